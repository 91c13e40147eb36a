"""Sizes of packed weights and the text of tactics, apart from layout.py, so that specs, and whoever
checks a plan, import no arrays. Of which form a weight's blocks are, its scheme says
(plugins/schemes/)."""

from __future__ import annotations

import re

TILE_ROWS = 64
CHUNK_BYTES = 128
LEAF_ROWS = (
    2 * TILE_ROWS
)  # what rows of a part of K (`leaves`) are multiples of: tiles of prefill.cu

# A tactic as engines hold it (tactics.py): "up to so many tokens:variant" and at last "*:many".
_VARIANT = (
    r"n\d{1,3}r\d{1,3}c\d{1,3}s\d{1,4}k\d{1,3}g\d{1,4}f\d{1,3}"
    r"(?:\+norm\d{1,3})?(?:\+pair)?(?:\+ahead\d{1,3})?"
)
MANY = "many"  # the kernel for many tokens, which chooses its own tile
TACTIC = re.compile(rf"(?:[1-9]\d{{0,5}}:(?:{_VARIANT}|many);)*\*:many", re.ASCII)


def few_tokens(tactic: str) -> int:
    """Up to how many tokens a tactic has kernels for few."""
    most = 0
    for entry in tactic.split(";"):
        limit, _, variant = entry.partition(":")
        if variant == MANY:
            break
        most = int(limit)
    return most
