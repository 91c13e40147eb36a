"""Ranks that a launcher starts, and ranks of a Python program: they are one run, and its end is the
end of all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.e2e import DemoPair
from support.rank_runs import (
    END_S,
    ENDLESS,
    JOB,
    LIMIT_S,
    SHORT,
    Ranks,
    children,
    end_of,
    require_gone,
    require_one_error,
)

import llmctl
from llmctl.errors import OutOfMemory, RankFailure
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.engines.cpu_engine import CpuEngine

MPIRUN = [
    str(Path(sys.executable).with_name("mpirun")),
    *("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"),
    *(sys.executable, "-m", "llmctl.cli.entry"),
]


# ---- a launcher ----


def test_processes_of_a_launcher_are_one_run(ranks: Ranks) -> None:
    """Only rank 0 prints, and only rank 0 reads stdin."""
    alone = ranks.launch(ranks.program, SHORT, {})
    wanted = alone.communicate(timeout=LIMIT_S)[0]
    follower = ranks.launch(ranks.program, SHORT, {**JOB, "RANK": "1"})
    leader = ranks.launch(ranks.program, SHORT, {**JOB, "RANK": "0"})
    assert leader.communicate(timeout=LIMIT_S)[0] == wanted and leader.returncode == 0
    assert follower.communicate(timeout=LIMIT_S)[0] == ""


def test_mpirun_starts_a_run(ranks: Ranks) -> None:
    run = ranks.launch(MPIRUN, SHORT, {})
    out, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, err
    assert out.count("Output [Text 0 Beam 0]") == 1 and "on each of 2 ranks" in err


def _ranks_of(run: subprocess.Popen[str]) -> list[int]:
    """The processes that mpirun has started, once they generate, by rank."""
    assert run.stderr is not None
    for line in run.stderr:
        if line.startswith("KV cache"):
            break
    found = {}
    for pid in children(run.pid):
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        named = dict(line.split("=", 1) for line in variables if "=" in line)
        if "OMPI_COMM_WORLD_RANK" in named:
            found[int(named["OMPI_COMM_WORLD_RANK"])] = pid
    return [found[rank] for rank in sorted(found)]


def test_mpirun_ends_with_a_rank_that_hangs(ranks: Ranks) -> None:
    run = ranks.launch(MPIRUN, (*ENDLESS, "--rank-timeout", 1), {})
    _, follower = pids = _ranks_of(run)
    os.kill(follower, signal.SIGSTOP)
    code, err = end_of(run, END_S)
    assert code == 1
    require_one_error(err, f"rank 1 (process {follower}) has not ")
    for pid in pids:
        require_gone(pid)


@pytest.mark.parametrize("rank", [0, 1])
def test_mpirun_ends_with_a_rank_that_is_killed(ranks: Ranks, rank: int) -> None:
    """mpirun may end rank 0 before that has said which; it says so itself."""
    run = ranks.launch(MPIRUN, ENDLESS, {})
    pids = _ranks_of(run)
    os.kill(pids[rank], signal.SIGKILL)
    code, err = end_of(run, END_S)
    assert code != 0 and "Traceback" not in err
    assert f"rank {rank} with PID {pids[rank]}" in " ".join(err.split())
    for pid in pids:
        require_gone(pid)


def test_ctrl_c_of_mpirun_ends_all_ranks(ranks: Ranks) -> None:
    run = ranks.launch(MPIRUN, ENDLESS, {})
    pids = _ranks_of(run)
    os.kill(run.pid, signal.SIGINT)
    code, err = end_of(run, END_S)
    assert code != 0 and "RankFailure" not in err and "Traceback" not in err, err
    for pid in pids:
        require_gone(pid)


# ---- a program ----


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Executor, int]]:
    """An executor of two ranks in this process, and the process of rank 1."""
    before = set(children(os.getpid()))
    with llmctl.open(folder) as executor:
        (pid,) = set(children(os.getpid())) - before
        yield executor, pid
    require_gone(pid)


def test_a_program_hears_of_a_lost_rank_at_every_request(demo: DemoPair) -> None:
    with opened(demo.engine("target-fp8-tp2")) as (executor, pid):
        assert len(list(executor.generate([5, 6], max_tokens=3))) == 3
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(RankFailure, match=f"rank 1 .process {pid}. was killed by SIGKILL"):
                list(executor.generate([5, 6], max_tokens=30))
            assert time.monotonic() - start < END_S


def test_a_failure_of_rank_0_ends_the_others(
    demo: DemoPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait at the next sum for ever."""

    def fail(self: CpuEngine, step: object) -> None:
        raise OutOfMemory("no room for a step")

    with opened(demo.engine("target-fp8-tp2")) as (executor, _):
        monkeypatch.setattr(CpuEngine, "run", fail)
        with pytest.raises(OutOfMemory, match="no room for a step"):
            list(executor.generate([5, 6], max_tokens=3))
        with pytest.raises(RankFailure, match="rank 0 failed: OutOfMemory: no room for a step"):
            list(executor.generate([5, 6], max_tokens=3))


def test_a_terminated_leader_ends_all_ranks(ranks: Ranks) -> None:
    leader = ranks.start(*ENDLESS)
    pid = ranks.follower(leader)
    leader.terminate()
    code, err = end_of(leader, END_S)
    assert code == 143 and "RankFailure" not in err and "Traceback" not in err, err
    require_gone(pid)
