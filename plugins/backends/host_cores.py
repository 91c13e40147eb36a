"""How many cores this process may use: the machine's, or its control group's if those are fewer,
as in a container."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from llmctl.plugins.backends.host_memory import CGROUP

# Of version 2 and 1: the microseconds of processor time in each period, and the period's.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Physical cores this process may use, within its control group's CPU quota; at least 1."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    quota = core_quota(cgroup)
    return len(cores) if quota is None else max(1, min(len(cores), quota))


def core_quota(cgroup: Path = CGROUP) -> int | None:
    """Whole cores' time that the control group leaves, 0 for less than one; None: no limit."""
    found = []
    for names in _QUOTAS:
        with suppress(OSError, ValueError):  # no such group, or a quota of "max"
            words = " ".join((cgroup / name).read_text() for name in names).split()
            quota, period = map(int, words)
            if quota > 0 and period > 0:  # -1: no limit
                found.append(quota // period)
    return min(found, default=None)
