"""What the blocks of packed weights are: layout.py and mxfp4.py say how they lie in memory.

Apart from both, so that specs, and whoever checks a plan, import no arrays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TILE_ROWS = 64
CHUNK_BYTES = 128
MXFP4 = "uint8"  # the dtype of packed 4-bit weights
CHUNK_COLUMNS = 256  # of a packed block of 4-bit weights
ROW_BYTES = 136  # of its rows: codes and steps


@dataclass(frozen=True, slots=True)
class Form:
    """What the blocks of a packed weight are."""

    block_bytes: int  # of 64 rows
    columns: int  # elements of K
    token_chunks: int  # chunks of 128 bytes of a token that one block is multiplied by
    interval: int  # blocks of one interval of an FP8 sum: 512 elements of K


FORMS = {
    "float8_e4m3fn": Form(8192, 128, 1, 4),
    "bfloat16": Form(8192, 64, 1, 4),
    "float16": Form(8192, 64, 1, 4),
    MXFP4: Form(TILE_ROWS * ROW_BYTES, CHUNK_COLUMNS, 2, 2),
}

# A tactic as engines hold it (tactics.py): "up to so many tokens:variant" and at last "*:many".
_VARIANT = r"n\d{1,3}r\d{1,3}c\d{1,3}s\d{1,4}k\d{1,3}g\d{1,4}f\d{1,3}(?:\+norm\d{1,3})?"
TACTIC = re.compile(rf"(?:[1-9]\d{{0,5}}:(?:{_VARIANT}|many);)*\*:many", re.ASCII)
