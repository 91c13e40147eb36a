"""The CPU kernels' threads of a test worker and of the programs it starts."""

from __future__ import annotations

import os
from pathlib import Path


def share_cores() -> None:
    """From now on, where nobody says how many, as many threads as this worker's part of the cores.

    Threads of several workers would wait for one another's core at every operation: a fifth of all
    CPU time. That results do not depend on threads is tested where their number is said.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    from llmctl.plugins.backends import host_cores
    from llmctl.plugins.backends.host_memory import CGROUP

    of_machine = host_cores.usable_cores

    def of_worker(cgroup: Path = CGROUP) -> int:
        return max(1, of_machine(cgroup) // workers)

    host_cores.usable_cores = of_worker
