"""Which rank a process is, from the variables of whoever started it; ranks that rank 0 starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.errors import BadConfig, RankFailure
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.ranks.launch import address_of, find_world
from llmctl.runtime.ranks.processes import RankOptions, start_rank

JOB = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a job"}

LAUNCHERS: dict[str, tuple[dict[str, str], tuple[int, int] | None]] = {
    "nothing": ({}, None),
    "Open MPI": ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
    "srun": ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
    "a batch script of Slurm, without srun": ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),
    "one process": ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    "rank 0 within a launcher": (
        {"RANK": "0", "WORLD_SIZE": "2", "LLMCTL_RANK": "1", "LLMCTL_WORLD_SIZE": "4"},
        (1, 4),
    ),
}


@pytest.mark.parametrize("case", LAUNCHERS)
def test_a_rank_is_found_in_the_environment(case: str) -> None:
    environment, wanted = LAUNCHERS[case]
    found = find_world(environment)
    assert (found and (found.rank, found.size)) == wanted


def test_jobs_have_names_of_their_own() -> None:
    one = find_world({**JOB, "RANK": "0", "MASTER_PORT": "1"})
    other = find_world({**JOB, "RANK": "0", "MASTER_PORT": "2"})
    assert one is not None and other is not None
    assert address_of(one.job) != address_of(other.job)
    with pytest.raises(BadConfig, match="RANK is 'x'"):
        find_world({"RANK": "x", "WORLD_SIZE": "2"})


def test_a_rank_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may be the engine's, which may be a stranger's."""
    (tmp_path / "numpy.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(tmp_path)
    options = RankOptions(2, {"target": tmp_path}, WindowOptions(), 1, limit_s=0.1)
    ended = start_rank(1, "a job without rank 0", options).wait(60)
    assert ended == RankFailure.exit_code
    assert "there is no rank 0 of this job" in capfd.readouterr().err
