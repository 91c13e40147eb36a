"""How many random schedules are tried."""

from __future__ import annotations

import os


def schedules(count: int) -> range:
    """So many seeds; half where there are two cores, on which every change waits for its tests."""
    return range(count if (os.cpu_count() or 1) > 2 else -(-count // 2))
