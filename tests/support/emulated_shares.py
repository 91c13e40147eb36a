"""How two thread blocks share a context in tree.cu, on a CPU: what they send each other, the order
in which it is merged, and which rows and dimensions the tail hands to whom.

What it shows: addresses, the order of sums, counts and phases of barriers, and that blocks do not
wait in a circle. What it does not: products, the GPU's memory and its scheduling.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from llmctl.plugins.backends.cuda.compiler import PLUGINS
from support.emulated_peers import CUDA, compile_kept

_FOLDER = PLUGINS / "ops" / "paged_attention"
_MEMORY_BYTES = 60 << 10  # of a block
_PTX = {  # functions of the sources, in C++
    "load_pair": "a = floats_at(address)[0], b = floats_at(address)[1];",
    "load_four": "std::copy_n(floats_at(address), 4, x);",
    "store_two": "floats_at(address)[0] = a, floats_at(address)[1] = b;",
    "store_four": "store_two(address, a, b), store_two(address + 8, c, d);",
}
_PARTS = (  # of the sources, each from a first text up to another
    ("units.cuh", "DEVICE int highest_bit", "// The step parameters of one request"),
    ("chunk_rows.cuh", "// By how much sums of", "// Stores what is merged"),
    ("tree_shares.cuh", "constexpr int OWN", "// Brings the keys and values"),
    ("tree_paths.cuh", "// Some of a warp's tokens.", "// Which requests of a step"),
    ("tree_tail.cuh", "// A work item's rows while", "// Shared memory behind"),
    ("tree_tail.cuh", "// ---- rows as the computing", "// A step's trees"),
)


def compile_shares(*, splits: int, size: int, group: int) -> ctypes.CDLL:
    """`check_merging(units)` and `check_tail()`, which return how many numbers are wrong."""
    here = Path(__file__)
    before, behind = (here.with_name(f"emulated_shares{x}.h") for x in ("", "_checks"))
    parts = [_cut(*part) for part in _PARTS]
    parts[3] = f"namespace columns {{\n{parts[3]}}}\n"
    text = "\n".join(parts)
    for name, body in _PTX.items():
        pattern = rf"(DEVICE void {name}\([^{{]*\) {{\n).*?\n}}\n"
        text, count = re.subn(pattern, rf"\1  {body}\n}}\n", text, flags=re.DOTALL)
        assert count == 1, name
    text = re.sub(r"#if SPLITS == 1\n.*?#else\n(.*?)#endif\n", r"\1", text, flags=re.DOTALL)
    assert "asm" not in text, "PTX without a counterpart"
    whole = (CUDA.read_text(), before.read_text(), text, behind.read_text())
    macros = {"SPLITS": splits, "SIZE": size, "GROUP": group, "MEMORY_BYTES": _MEMORY_BYTES}
    return compile_kept("\n".join(whole), **macros)


def _cut(name: str, first: str, last: str) -> str:
    text = (_FOLDER / name).read_text()
    return text[text.index(first) : text.index(last)]
