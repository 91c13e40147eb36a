"""What ranks with a GPU each launch, on a CPU: every thread of every block is a thread here, and
PTX is C++'s atomics.

What it shows: addresses, the order of sums, halves and the numbers of launches, and that ranks do
not wait in a circle. What it does not: the GPU's memory and scheduling, and the arithmetic of
`norm_math.cuh`, which C++ stands for.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from llmctl.plugins.backends.cuda.compiler import PLUGINS
from support.emulated import compile_cpp

EXCHANGE, NORM = "ops/all_reduce/peers.cu", "fused/all_reduce_norm/peers.cu"
BEST, DRAWS = "ops/rank_argmax/peers.cu", "ops/rank_draw/peers.cu"
OFFERS = "ops/rank_offers/peers.cu"
MEETING = "ops/all_reduce/meeting.cuh"
EPILOGUE = "ops/packed_linear/epilogue_values.cuh"
PRODUCT = "the epilogue of products that hand their sums on"
THREADS = 8  # of a block, but where norms are: instead of the GPU's, for these are the system's
CUDA, NORM_MATH = (Path(__file__).with_name(f"emulated_{n}.h") for n in ("cuda", "norms"))
_PTX = {  # functions of the sources, in C++
    "now_ns": "return std::chrono::steady_clock::now().time_since_epoch().count();",
    # Who waits sleeps: hundreds of threads that yield take all of two cores from who computes.
    "read_host": (
        "std::this_thread::sleep_for(std::chrono::microseconds(100)); "
        "return __atomic_load_n(lost, __ATOMIC_RELAXED);"
    ),
    "write_host": "__atomic_store_n(lost, x, __ATOMIC_RELAXED);",
    "read_begun": "return __atomic_load_n(&state->begun, __ATOMIC_ACQUIRE);",
    "add_begun": "__atomic_fetch_add(&state->begun, x, __ATOMIC_ACQ_REL);",
    "put": "store_words(to, x);",
    "look": "std::this_thread::yield(); return load_words(at);",
    "send_part": "send_to_block(address, barrier, x);",
    "exp2_approx": "return std::exp2(x);",
}
_PARAMETERS = re.compile(
    r'extern "C" __global__ void __launch_bounds__\(THREADS\)\s+(\w+)\(([^)]*)\)'
)


# A block that has all sums of a product already, and stores them as decode.cu does.
_PRODUCT = """
constexpr int THREADS = 32;
extern "C" __global__ void __launch_bounds__(THREADS)
    product(const long long* bases, State* state, int* lost, const float* x, float* out, int rank,
            int rows, long long slot_bytes, long long limit_ns) {
  const Epilogue e = {out, nullptr, nullptr, nullptr, 0, rows, WIDTH,
                      bases, state, rank, slot_bytes};
  const int lane = threadIdx.x;
  for (int group = 0; group < WIDTH / 16; ++group) {
    for (int token = lane % 4; token < (rows + 3) / 4 * 4; token += 4) {
      const int at = min(token, rows - 1) * WIDTH + 16 * group + lane / 4;
      const TokenConstants constants = load_token(e, group, token);
      store_pair(e, load_rows(e, group), constants, group, token, x[at], x[at + 8]);
    }
  }
}
"""


def _product() -> str:
    """The parts of the epilogue that it needs."""
    text = (PLUGINS / EPILOGUE).read_text()
    first, last = (f"#elif EPILOGUE == {i}\n\nstruct" for i in (3, 2))
    common = text[: text.index("#if EPILOGUE == 0\n\nstruct")]
    own = text[text.index(first) + len("#elif EPILOGUE == 3\n") : text.index(last)]
    return f'#include "{MEETING}"\n{common}{own}{_PRODUCT}'


def as_cpp(source: str) -> str:
    """The source in C++. AssertionError where it has PTX that is not known here."""
    meeting = (PLUGINS / MEETING).read_text().replace("#pragma once", "")
    text = _product() if source == PRODUCT else (PLUGINS / source).read_text()
    assert f'#include "{MEETING}"\n' in text
    text = text.replace(f'#include "{MEETING}"\n', meeting)
    text = re.sub(r'#include "backends/cuda/sm90/\w+\.cuh"\n', "", text)
    text = text.replace("constexpr int THREADS = 256;", f"constexpr int THREADS = {THREADS};")
    often = "LOOK_AT_HOST = 4;"
    text, count = re.subn(r"LOOK_AT_HOST = \d+;", often, text)
    assert count == 1
    text = text.replace("extern __shared__ u8 memory[];", "u8* memory = own_block->memory;")
    for name, body in _PTX.items():
        pattern = rf"(DEVICE [\w ]+\b{name}\([^)]*\) {{\n).*?\n}}\n"
        text, count = re.subn(pattern, rf"\1  {body}\n}}\n", text, flags=re.DOTALL)
        in_some = {"send_part": int(source == NORM), "exp2_approx": int(source == OFFERS)}
        wanted = {"put": 3, "look": 2, **in_some}.get(name, 1)
        assert count == wanted, name
    assert "asm" not in text, "PTX without a counterpart"
    found = _PARAMETERS.search(text)
    assert found is not None
    name, parameters = found.groups()
    names = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
    launch = f"""
extern "C" void launch(int grid, int cluster, {parameters}) {{
  run_blocks(grid, cluster, THREADS, [=] {{ {name}({names}); }});
}}
"""
    return f"{NORM_MATH.read_text() if source == NORM else ''}{text}{launch}"


def compile_peers(source: str = EXCHANGE, **macros: object) -> ctypes.CDLL:
    """The kernel of these macros; `launch` returns when all of its blocks are done."""
    return compile_cpp(as_cpp(source), [CUDA], macros)
