"""Free memory is the lesser of the machine's and of what a container may still take."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.errors import OutOfMemory
from llmctl.plugins.backends.host_memory import free_memory_bytes

MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"


def test_free_memory_is_read_from_the_kernel() -> None:
    assert 10**8 < free_memory_bytes() < 10**15


@pytest.mark.parametrize(
    ("files", "unlimited", "cache"),
    [
        (("memory.max", "memory.current", "memory.stat"), "max", "inactive_file"),
        (
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
            "9223372036854771712",
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_control_group_may_leave_less_than_the_machine(
    tmp_path: Path, files: tuple[str, str, str], unlimited: str, cache: str
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert free_memory_bytes(meminfo, tmp_path) == 8_192_000
    limit, used, stat = (tmp_path / name for name in files)
    limit.parent.mkdir(exist_ok=True)
    limit.write_text(f"{unlimited}\n")
    used.write_text("2000000\n")
    stat.write_text(f"active_file 1\n{cache} 500000\n")
    assert free_memory_bytes(meminfo, tmp_path) == 8_192_000
    limit.write_text("3000000\n")
    assert free_memory_bytes(meminfo, tmp_path) == 1_500_000
    limit.write_text("1000000\n")
    assert free_memory_bytes(meminfo, tmp_path) == 0
    used.unlink()
    assert free_memory_bytes(meminfo, tmp_path) == 8_192_000, "it does not say what is used"


def test_a_kernel_that_does_not_say_what_is_free_is_named(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\n")
    with pytest.raises(OutOfMemory, match="no MemAvailable line"):
        free_memory_bytes(tmp_path / "meminfo", tmp_path)
