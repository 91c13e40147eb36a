"""Which rank of how many this process is, as whoever started it says in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from llmctl.builder.engine_format import EngineConfig
from llmctl.errors import BadConfig, Unsupported
from llmctl.plugins.backends.backend import BACKENDS

OWN_LAUNCHER = "rank 0"
OWN = ("LLMCTL_RANK", "LLMCTL_WORLD_SIZE", "LLMCTL_JOB")  # of ranks that rank 0 starts itself

# Names of rank, number of ranks, and what tells one job of this machine from another. Slurm's are
# those of a step: within an allocation, but outside `srun`, a program runs alone.
_LAUNCHERS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    OWN_LAUNCHER: (OWN[0], OWN[1], (OWN[2],)),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    "MPICH": ("PMI_RANK", "PMI_SIZE", ("PMI_JOBID",)),
    "torchrun": ("RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_PORT")),
}


@dataclass(frozen=True, slots=True)
class World:
    """This process among the ranks of a job. job: names it on this machine."""

    launcher: str
    rank: int
    size: int
    job: str


def find_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """The job that this process belongs to; None if it was started alone.

    Raises BadConfig for variables that contradict each other.
    """
    for launcher, (rank_name, size_name, job_names) in _LAUNCHERS.items():
        if rank_name not in environment or size_name not in environment:
            continue
        try:
            rank, size = int(environment[rank_name]), int(environment[size_name])
        except ValueError:
            rank, size = -1, 0
        if not 0 <= rank < size:
            raise BadConfig(
                f"{rank_name} is {environment[rank_name]!r} and {size_name} is "
                f"{environment[size_name]!r}; a rank from 0, below the number of ranks, is wanted",
                fix=f"unset both where no {launcher} starts this program",
            )
        if size == 1:
            continue
        found = [environment[name] for name in job_names if name in environment]
        # Processes of one launcher have one parent where it names no job.
        job = "-".join(found) if found else f"{launcher}-parent-{os.getppid()}"
        return World(launcher, rank, size, job)
    return None


def world_of(config: EngineConfig) -> World | None:
    """The job whose processes run this engine together. None where nothing has started this process
    with others, and for an engine of one rank: each process of a launcher then runs a copy.

    Raises what `find_world` raises.
    """
    return find_world() if config.num_ranks > 1 else None


def require_world(config: EngineConfig, tp_size: int | None, *, waits: bool = False) -> None:
    """Raise BadConfig where the engine has another number of ranks than were started, or asked
    for by --tp-size. waits: --rank-timeout is given."""
    ranks = config.num_ranks
    if waits and ranks == 1:
        raise BadConfig(
            "--rank-timeout is for engines of several ranks; this one has 1", fix="leave it out"
        )
    again = f"llmctl build ... --tp-size {tp_size}"
    if tp_size is not None and tp_size != ranks:
        raise BadConfig(
            f"--tp-size is {tp_size}; the engine has {ranks} rank{'s' if ranks > 1 else ''}",
            fix=f"leave --tp-size out, or build it again: {again}",
        )
    world = world_of(config)
    if world is not None and world.size != ranks:
        raise BadConfig(
            f"the engine has {ranks} ranks, and {world.launcher} started {world.size} processes",
            fix=f"mpirun -n {ranks} llmctl run ..., or llmctl run ... alone, which starts the "
            "others",
        )


def require_drafts(configs: Mapping[str, EngineConfig]) -> None:
    """Raise Unsupported for a draft engine of some other number of ranks: it has one, and runs in
    rank 0, or as many as the target, the first of `configs`."""
    counts = {role: c.num_ranks for role, c in configs.items()}
    wanted = next(iter(counts.values()))
    for role, count in counts.items():
        if count not in (1, wanted):
            raise Unsupported(
                f"the {role} engine has {count} ranks, and the target has {wanted}",
                fix=f"build it with --tp-size {' or '.join(dict.fromkeys(('1', str(wanted))))}",
            )


def shared_folders(
    configs: Mapping[str, EngineConfig], folders: Mapping[str, Path]
) -> dict[str, Path]:
    """Of the engines that every rank has a part of. A draft engine of one rank is rank 0's; where
    ranks have a GPU each, all draft alike."""
    target = next(iter(configs.values()))
    if BACKENDS[target.backend].on_gpu:
        return dict(folders)
    wanted = target.num_ranks
    return {role: folders[role] for role, c in configs.items() if c.num_ranks == wanted}


def address_of(job: str) -> str:
    """Where rank 0 of a job listens: a name without a file, which ends with the process."""
    return f"\0llmctl-{os.getuid()}-{sha256(job.encode()).hexdigest()[:20]}"
