"""As many cores as the machine has, or as a container's quota of processor time leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmctl.plugins.backends.host_cores import core_quota, usable_cores

VERSION_2, VERSION_1 = ("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")


def write(folder: Path, names: tuple[str, ...], quota: str, period: str = "100000") -> None:
    (folder / names[0]).parent.mkdir(exist_ok=True)
    texts = (f"{quota} {period}\n",) if len(names) == 1 else (f"{quota}\n", f"{period}\n")
    for name, text in zip(names, texts, strict=True):
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("names", "unlimited"), [(VERSION_2, "max"), (VERSION_1, "-1")], ids=["version 2", "version 1"]
)
def test_a_control_group_may_leave_fewer_cores_than_the_machine(
    tmp_path: Path, names: tuple[str, ...], unlimited: str
) -> None:
    machine = usable_cores(tmp_path)
    assert core_quota(tmp_path) is None and 1 <= machine <= os.cpu_count()
    write(tmp_path, names, unlimited)
    assert core_quota(tmp_path) is None and usable_cores(tmp_path) == machine
    write(tmp_path, names, "350000")
    assert core_quota(tmp_path) == 3 and 1 <= usable_cores(tmp_path) <= min(machine, 3)
    write(tmp_path, names, "100000", "50000")
    assert core_quota(tmp_path) == 2
    write(tmp_path, names, "50000")  # half a core's time: one thread
    assert core_quota(tmp_path) == 0 and usable_cores(tmp_path) == 1


def test_the_smaller_of_two_quotas_counts_and_half_of_one_does_not(tmp_path: Path) -> None:
    write(tmp_path, VERSION_2, "800000")
    write(tmp_path, VERSION_1, "200000")
    assert core_quota(tmp_path) == 2
    (tmp_path / VERSION_1[1]).unlink()
    assert core_quota(tmp_path) == 8
