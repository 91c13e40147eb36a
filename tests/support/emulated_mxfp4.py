"""mxfp4.cuh on a CPU: what each thread of four warps makes of a packed block of 4-bit weights."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from llmctl.plugins.backends.cuda.compiler import PLUGINS
from support.emulated import compile_cpp

_HEADERS = [Path(__file__).with_name(f"emulated_{name}.h") for name in ("numbers", "fibers")]
_HEAD = """
#include <cstdint>
#include <cstring>
using emu::u16; using emu::u32; using emu::u64;
"""
_BODIES = {  # functions of the source, in C++
    "permute": (
        "const unsigned long long both = low | (unsigned long long)high << 32; u32 y = 0;"
        "for (int i = 0; i < 4; ++i) y |= u32(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;"
        "return y;"
    ),
    "upper_half": "return which >> 16 | which & 0xffff0000;",
    "load_shared": "uint4 x; std::memcpy(&x, memory + at, 16); return x;",
    "load_shared_pair": "uint2 x; std::memcpy(&x, memory + at, 8); return x;",
    "make_mxfp4_table": (
        "for (int i = 0; i < MXFP4_STEPS; ++i) { const uint2 x = mxfp4_numbers(i);"
        "std::memcpy(memory + table + 8 * i, &x, 8); }"
    ),
}
_TAIL = """
extern "C" void make_all(const unsigned char* packed, u32* to) {
  constexpr u32 BLOCK = 256;  // behind the table
  make_mxfp4_table(0);
  std::memcpy(memory + BLOCK, packed, 8 * MXFP4_OCTET_BYTES);
  for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {
    u32 a[8][4], half[4][4];
    const Mxfp4Chunk chunk(0, BLOCK + threadIdx.x / 32 * 2 * MXFP4_OCTET_BYTES);
    chunk.expand(0, a);
    for (int i = 0; i < 8; i += 4) {
      chunk.expand(i, half);
      if (std::memcmp(half, a + i, sizeof half)) std::memset(a, 0xff, sizeof a);
    }
    std::memcpy(to + threadIdx.x * 32, a, sizeof a);
  }
}
"""


def as_cpp() -> str:
    """The source, but for products, in C++."""
    text = (PLUGINS / "schemes" / "mxfp4" / "mxfp4.cuh").read_text()
    text = text[: text.index("HELD_PRODUCT(")]
    text = re.sub(r"#(include|pragma) .*\n", "\n", text)
    for name, body in _BODIES.items():
        (found,) = re.finditer(rf"^DEVICE [\w ]+\b{name}\(.*?^}}", text, re.DOTALL | re.MULTILINE)
        head = found[0][: found[0].index("{")]
        text = text.replace(found[0], head + "{ " + body + " }")
    shared = "alignas(256) static unsigned char memory[16384]; static struct { u32 x; } threadIdx;"
    numbers = (
        "struct E4M3 { static u32 pack_pair(float a, float b) "
        "{ return emu::e4m3(a) | u32(emu::e4m3(b)) << 8; } };"
        "inline float __uint_as_float(u32 x) { return emu::number(x); }"
    )
    return _HEAD + shared + numbers + text + _TAIL


def compile_mxfp4() -> ctypes.CDLL:
    """`make_all` of one packed block."""
    return compile_cpp(as_cpp(), _HEADERS, {"DEVICE": "inline"})
