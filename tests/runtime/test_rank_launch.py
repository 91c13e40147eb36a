"""Which rank a process is, from the variables of whoever started it."""

from __future__ import annotations

import pytest

from llmctl.errors import BadConfig
from llmctl.runtime.ranks.launch import address_of, find_world

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
