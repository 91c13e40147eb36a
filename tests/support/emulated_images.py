"""images.cu on a CPU, one thread after another: its threads share nothing. It shows addresses and
what is written where; conversions are C++'s."""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from pathlib import Path

from llmctl.plugins.backends.cpu.compile import find_compiler
from llmctl.plugins.backends.cuda.compiler import PLUGINS

_HEADER = Path(__file__).with_name("emulated_images.h")
_SOURCES = ("units.cuh", "operands.cuh", "image_places.cuh", "images.cu")
_PTX = {  # functions of the sources, in C++
    "next_chunk": (
        "for (; request < num_requests; ++request) {"
        "if (cu_q[request + 1] - cu_q[request] >= min_tokens && kv_lens[request] > 0) break; }"
        "return request;"
    ),
    "load_int": "return *p;",
    "load_piece": 'cache_bytes.check(from, "read"); std::memcpy(&x, from, 16);',
    "widen": (
        "low = half_of(x) | half_of(x >> 8) << 16;high = half_of(x >> 16) | half_of(x >> 24) << 16;"
    ),
    "store_global": (
        'image_bytes.check(to, "write");const u32 x[4] = {a, b, c, d};std::memcpy(to, x, 16);'
    ),
}
_UNUSED = ("to_inner", "exp2", "minus_infinity", "read_number", "store_shared", "shared_fence")
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w")
_LAUNCH = """
extern "C" void launch(u8* cache, long long cache_size, const int* cu_q, const int* kv_lens,
                       const int* tables, u8* first, long long size, int stride, int requests,
                       int min_tokens, int room_tiles, int first_head, int num_heads, int grid) {
  cache_bytes = {cache, cache + cache_size}, image_bytes = {first, first + size};
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < u32(grid); ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) {
      images((const KV_TYPE::Storage*)cache, cu_q, kv_lens, tables, first, stride, requests,
             min_tokens, room_tiles, first_head, num_heads);
    }
  }
}
"""


def as_cpp() -> str:
    """The kernel and what it includes, in C++."""
    folder = PLUGINS / "ops" / "paged_attention"
    text = "\n".join((folder / name).read_text() for name in _SOURCES)
    text = re.sub(r"#(include|pragma) .*\n", "\n", text)
    for name, body in _PTX.items():
        text = _with_body(text, name, f"{{ {body} }}")
    for name in _UNUSED:
        text = _with_body(text, name, ";")
    text = re.sub(r"\basm( volatile)?\((?:\"[^\"]*\"|[^\";])*\);", ";", text)  # hints
    text = re.sub(r"__launch_bounds__\([^)]*\)", "", text).replace("__clz", "__builtin_clz")
    return f'#include "{_HEADER}"\n' + text.replace("__global__", "") + _LAUNCH


def _with_body(text: str, name: str, body: str) -> str:
    (found,) = re.finditer(rf"DEVICE [\w ]+\b{name}\([^)]*\) {{", text)
    depth, end = 1, found.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return text[: found.end() - 1] + body + text[end:]


def compile_images(**macros: object) -> ctypes.CDLL:
    """The kernel of these macros."""
    return _compiled(as_cpp(), [f"-D{key}={value}" for key, value in macros.items()])


def _compiled(text: str, options: list[str]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "images.cpp"), Path(folder, "images.so")
        source.write_text(text)
        command = [*find_compiler(), *_FLAGS, *options, str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(library))


_SEARCH = """
#include <pthread.h>
typedef unsigned int u32;
#define DEVICE inline
static thread_local struct { u32 x; } threadIdx;
static pthread_barrier_t meeting;
static bool votes[32];
inline int load_int(const int* p) { return *p; }
inline int __ffs(u32 x) { return __builtin_ffs(x); }
inline u32 __ballot_sync(u32, bool vote) {
  votes[threadIdx.x] = vote;
  pthread_barrier_wait(&meeting);
  u32 found = 0;
  for (int i = 0; i < 32; ++i) found |= u32(votes[i]) << i;
  pthread_barrier_wait(&meeting);
  return found;
}
NEXT_CHUNK
struct Lane { u32 x; const int *cu_q, *kv_lens; int requests, min_tokens, *found; };
static void* run(void* given) {
  const Lane& lane = *static_cast<Lane*>(given);
  threadIdx.x = lane.x;
  int request = -1, *to = lane.found;
  do {
    request = next_chunk(request + 1, lane.cu_q, lane.kv_lens, lane.requests, lane.min_tokens);
    *to++ = request;
  } while (request < lane.requests);
  return nullptr;
}
extern "C" void search(const int* cu_q, const int* kv_lens, int requests, int min_tokens,
                       int* found) {
  pthread_t threads[32];
  Lane lanes[32];
  pthread_barrier_init(&meeting, nullptr, 32);
  for (u32 i = 0; i < 32; ++i) {
    lanes[i] = {i, cu_q, kv_lens, requests, min_tokens, found + i * (requests + 1)};
    pthread_create(&threads[i], nullptr, run, &lanes[i]);
  }
  for (pthread_t each : threads) pthread_join(each, nullptr);
}
"""


def compile_search() -> ctypes.CDLL:
    """How the kernel looks for chunks, as a warp of 32 threads that vote."""
    text = (PLUGINS / "ops" / "paged_attention" / "images.cu").read_text()
    (found,) = re.findall(r"^DEVICE int next_chunk\(.*?^}", text, re.DOTALL | re.MULTILINE)
    return _compiled(_SEARCH.replace("NEXT_CHUNK", found), ["-pthread"])
