"""How much more memory this process may use: the machine's, or its control group's if that is
less, as in a container."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from llmctl.errors import OutOfMemory

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# Of version 2 and 1: the limit, what is used, and the line of memory.stat with page cache that the
# kernel takes back before the limit is reached.
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that can be taken without swapping; page cache counts as free. Raises OutOfMemory where
    the kernel does not say."""
    free = _after(meminfo, "MemAvailable:")
    if free is None:
        raise OutOfMemory(
            f"{meminfo} has no MemAvailable line, which says what memory is left",
            fix="use a system whose kernel writes that line: Linux 3.14 and later",
        )
    free *= 1024  # the file counts in kB
    for limit, used, cache in _GROUPS:
        with suppress(OSError, ValueError):  # no such group, or a limit of "max"
            most = int((cgroup / limit).read_text())
            taken = int((cgroup / used).read_text())
            taken -= _after((cgroup / used).with_name("memory.stat"), cache) or 0
            free = min(free, max(0, most - taken))
    return free


def _after(path: Path, name: str) -> int | None:
    """The number behind a name at the beginning of a line."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return None
