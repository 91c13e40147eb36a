"""Where compiled kernels and plans are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """$XDG_CACHE_HOME, else ~/.cache. For a user without a home directory (in a container), a path
    where nothing can be stored: caches cost time, not correctness."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return Path(os.devnull)
