"""What scripts/bench/attention.py times and checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from support.attention import FP8, INT8, World

MODELS = {  # query heads, KV heads, head size
    "70B": (64, 8, 128),
    "8B": (32, 8, 128),
    "1B": (32, 8, 64),
}
GENERATION = [  # model, FP8 keys, batch, tokens a request, context
    *(("70B", True, 1, m, n) for n in (512, 1024, 2048, 4096) for m in (1, 11)),
    ("70B", False, 1, 1, 1024),
    ("70B", False, 1, 11, 1024),
    *(("1B", True, 1, m, n) for n in (512, 1024, 4096) for m in (1, 2, 11)),
    ("8B", True, 1, 1, 1024),
    ("8B", True, 8, 1, 1024),
    *(("8B", True, b, 1, 1024) for b in (16, 32, 64, 256)),
    ("8B", True, 256, 1, 640),
    ("8B", True, 64, 4, 1024),
    ("8B", False, 64, 1, 1024),
    *(("70B", f, b, 1, 4096) for f in (True, False) for b in (16, 64)),
    ("70B", True, 8, 11, 1024),
]
LONG = [  # the same of long contexts
    *((m, True, 1, 1, n) for m in ("70B", "8B") for n in (4096, 8192, 16384, 32768, 131072)),
    *((m, True, 1, 11, n) for m in ("70B", "8B") for n in (8192, 32768, 131072)),
    # No powers of two: work items have lengths with which those are divided most evenly.
    *((m, True, 1, t, n) for m in ("70B", "8B") for t in (1, 11) for n in (34000, 40000)),
    ("8B", True, 1, 4, 32768),
    ("70B", False, 1, 1, 32768),
    ("1B", True, 1, 1, 32768),
    *((m, True, b, 1, 32768) for m in ("70B", "8B") for b in (2, 4, 8, 64)),
    *((m, True, b, 11, 32768) for m in ("70B", "8B") for b in (8, 64)),
]
CONTEXT = [("70B", True, 1, n, n) for n in (512, 2048, 8192)] + [
    ("70B", False, 1, 2048, 2048),
    ("70B", True, 1, 2048, 16384),
    ("1B", True, 1, 2048, 2048),
]
FP8_CONTEXT = [(2048, 2048), (8192, 8192), (2048, 32768)]  # with FP8 products, 70B
LIKE_70B: Any = {"heads": 64, "kv_heads": 8, "size": 128, "kv_dtype": FP8, "quantize_out": True}
# Model, FP8 keys, batch, tokens of each request's tree, context. Every second token has three
# children.
TREES = [
    (m, True, b, n, c)
    for m in ("70B", "8B")
    for b, c in ((1, 1024), (1, 8192), (1, 32768), (8, 32768), (64, 32768))
    for n in ((16, 32, 64) if b == 1 else (32,))
]
SMALL: dict[str, Any] = {"heads": 8, "kv_heads": 2, "size": 128, "lengths": (700, 333)}
CHECKED: list[dict[str, Any]] = [
    {"kv_dtype": FP8, "quantize_out": True},
    {},
    {"dtype": torch.float16, "kv_dtype": torch.float16},
    {"kv_dtype": FP8, "size": 64, "lengths": (2600, 500)},
    {"kv_dtype": FP8, "size": 128, "lengths": (6000, 3000), "spread": 3.0, "heads": 16},
    {"size": 80, "heads": 4, "kv_heads": 4, "tokens_per_block": 8},
    {"size": 96, "heads": 7, "kv_heads": 1, "tokens_per_block": 128},
    {"window": 100, "lengths": (1500, 333)},
    {"kv_dtype": FP8, "window": 700, "lengths": (3000, 1333)},
    {"kv_dtype": INT8, "quantize_out": True, "lengths": (1500, 333)},
    {"kv_dtype": INT8, "size": 64, "lengths": (2600, 500)},
]


def covers(row: tuple[Any, ...], of: type[World]) -> bool:
    """Whether such worlds have a kernel for a row: FP8 products need FP8 caches and wide heads."""
    return of is World or (row[1] and MODELS[row[0]][2] == 128)
