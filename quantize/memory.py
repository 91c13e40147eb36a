"""How much more memory this process may use: the machine's, or its control group's if that is
less."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_memory_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that can be taken without swapping; page cache counts as available."""
    available = None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024  # the file counts in kB
    assert available is not None, f"{meminfo} has no MemAvailable"
    limit = cgroup / "memory.max"
    if not limit.is_file() or limit.read_text().strip() == "max":
        return available
    used = int((cgroup / "memory.current").read_text())
    for line in (cgroup / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            used -= int(line.split()[1])
    return max(0, min(available, int(limit.read_text()) - used))
