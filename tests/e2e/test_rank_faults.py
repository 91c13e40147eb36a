"""Whatever happens to a rank, the run ends within seconds with one error of rank 0 that says which
rank and why; no process and no shared memory stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
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
    end_of,
    require_gone,
    require_one_error,
)

from llmctl.runtime.ranks.launch import address_of, find_world

# A program that does something to llmctl before it runs a command line, or is a follower.
WRAPPED = "import sys; from llmctl.cli.entry import main; exec(sys.argv.pop(1)); main()"


def leader_beside(ranks: Ranks, follower: list[str], engine: Path) -> tuple[int, str]:
    """The end of rank 0, beside a rank 1 that is another program or has another engine."""
    ours, ranks.engine = ranks.engine, engine
    ranks.launch(follower, SHORT, {**JOB, "RANK": "1"})
    ranks.engine = ours
    return end_of(ranks.launch(ranks.program, SHORT, {**JOB, "RANK": "0"}))


# ---- ranks that end or hang ----


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGTERM, "ended with exit code 143")],
)
def test_a_rank_that_dies_ends_the_run(ranks: Ranks, number: signal.Signals, said: str) -> None:
    leader = ranks.start(*ENDLESS)
    pid = ranks.follower(leader)
    os.kill(pid, number)
    code, err = end_of(leader, END_S)
    assert code == 1
    require_one_error(err, f"error[RankFailure]: rank 1 (process {pid}) {said}")
    require_gone(pid)


def test_a_rank_that_hangs_ends_the_run(ranks: Ranks) -> None:
    soon = "import llmctl.runtime.ranks.processes as p; p.END_S = 0.5"  # then it is killed
    program = [sys.executable, "-c", WRAPPED, soon]
    leader = ranks.launch(program, (*ENDLESS, "--rank-timeout", 1), {})
    pid = ranks.follower(leader)
    os.kill(pid, signal.SIGSTOP)
    code, err = end_of(leader, END_S)
    assert code == 1
    require_one_error(err, f"rank 1 (process {pid}) has not ")
    assert "for 1 s: it hangs, or was stopped" in err  # come, or allocated its memory
    require_gone(pid)


def test_ctrl_c_ends_all_ranks(ranks: Ranks) -> None:
    """A terminal sends it to rank 0's whole process group; a launcher to every rank."""
    leader = ranks.start(*ENDLESS)
    pid = ranks.follower(leader)
    os.kill(pid, signal.SIGINT)
    os.killpg(leader.pid, signal.SIGINT)
    code, err = end_of(leader, END_S)
    assert code == 130 and "RankFailure" not in err and "Traceback" not in err, err
    require_gone(pid)


def test_ranks_end_with_a_leader_that_is_killed(ranks: Ranks) -> None:
    leader = ranks.start(*ENDLESS)
    pid = ranks.follower(leader)
    leader.kill()
    require_gone(pid)


def test_a_rank_that_fails_says_why(ranks: Ranks) -> None:
    """Here without memory for its cache, which rank 0 has."""
    fail = (
        "from llmctl.errors import OutOfMemory\n"
        "from llmctl.runtime.engines.cpu_cache import CpuCache\n"
        "def allocate(self, n): raise OutOfMemory('no room for the cache', fix='a smaller one')\n"
        "CpuCache.allocate = allocate"
    )
    program = [sys.executable, "-c", WRAPPED, fail]
    code, err = leader_beside(ranks, program, ranks.engine)
    assert code == 1
    require_one_error(err, "failed: OutOfMemory: no room for the cache")
    assert "fix: a smaller one" in err and "rank 1 (process" in err


# ---- ranks that are none of the run ----


def test_a_rank_with_another_engine_is_named(ranks: Ranks, tmp_path: Path) -> None:
    shutil.copytree(ranks.engine, tmp_path / "other")
    config = tmp_path / "other/config.json"
    config.write_text(config.read_text().replace('"command": "', '"command": "once '))
    code, err = leader_beside(ranks, ranks.program, tmp_path / "other")
    assert code == 1
    require_one_error(err, "has another target engine than rank 0")


def test_a_rank_without_an_engine_is_named(ranks: Ranks, tmp_path: Path) -> None:
    code, err = leader_beside(ranks, ranks.program, tmp_path / "nothing")
    assert code == 1
    require_one_error(err, f"failed: EngineNotFound: {tmp_path / 'nothing'} does not exist")


def test_a_rank_file_that_is_cut_off_is_named(ranks: Ranks, tmp_path: Path) -> None:
    shutil.copytree(ranks.engine, tmp_path / "cut")
    os.truncate(tmp_path / "cut/rank1.engine", 1000)
    ranks.engine = tmp_path / "cut"
    code, err = end_of(ranks.launch(ranks.program, SHORT, {}))
    assert code == 1
    require_one_error(err, "failed: CorruptEngine: ")
    assert "rank1.engine" in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("m.version = lambda name: '0.0.9'", "runs llmctl 0.0.9; rank 0 runs"),
        ("m.load_kernels = Other", "has CPU kernels of other sources (0ld)"),
    ],
)
def test_a_rank_of_another_version_is_named(ranks: Ranks, change: str, said: str) -> None:
    patch = (
        "import llmctl.runtime.ranks.identity as m\n"
        "class Other:\n"
        "    def llmctl_source_hash(self): return b'0ld'\n" + change
    )
    code, err = leader_beside(ranks, [sys.executable, "-c", WRAPPED, patch], ranks.engine)
    assert code == 1
    require_one_error(err, said)


def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    words = (*SHORT, "--rank-timeout", 1)
    code, err = end_of(ranks.launch(ranks.program, words, {**JOB, "RANK": "0"}))
    assert code == 1
    require_one_error(err, "rank 1 has not come within 1 s; 1 of 2 ranks are here")


@pytest.mark.parametrize(
    ("environment", "words", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, (), "has 2 ranks, and torchrun started 4 processes"),
        ({"RANK": "5", "WORLD_SIZE": "4"}, (), "RANK is '5' and WORLD_SIZE is '4'"),
        ({}, ("--tp-size", "4"), "--tp-size is 4; the engine has 2 ranks"),
        ({}, ("--rank-timeout", "nan"), "--rank-timeout is nan"),
    ],
)
def test_another_number_of_ranks_is_refused(
    ranks: Ranks, environment: dict[str, str], words: tuple[str, ...], said: str
) -> None:
    code, err = end_of(ranks.launch(ranks.program, (*SHORT, *words), environment))
    assert code == 2
    require_one_error(err, said)


def test_an_engine_of_one_rank_runs_in_every_process(ranks: Ranks, demo: DemoPair) -> None:
    ranks.engine = demo.engine("target-fp8")
    copies = [ranks.launch(ranks.program, SHORT, {**JOB, "RANK": rank}) for rank in "10"]
    outputs = {copy.communicate(timeout=LIMIT_S) for copy in copies}
    assert [copy.returncode for copy in copies] == [0, 0]
    assert all("Output [Text 0 Beam 0]" in out for out, err in outputs)


def test_a_job_that_has_a_rank_0_already_is_named(ranks: Ranks) -> None:
    environment = {**JOB, "RANK": "0"}
    world = find_world(environment)
    assert world is not None
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(address_of(world.job))
        code, err = end_of(ranks.launch(ranks.program, SHORT, environment))
    assert code == 1
    require_one_error(err, "has a rank 0 already")
