"""Where compiled kernels and plans are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """$XDG_CACHE_HOME, else ~/.cache. Where nobody has a home (a container's user without an
    entry), a place where nothing can be kept: caches cost time, not correctness."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return Path(os.devnull)
