"""`peers.cu` on a CPU: every thread of every block is a thread here, and PTX is C++'s atomics.

What it shows: addresses, the order of sums, flags, halves and the numbers of launches, and that
ranks do not wait in a circle. What it does not: the GPU's memory and scheduling.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

from llmctl.plugins.backends.cpu.compile import find_compiler
from llmctl.plugins.backends.cuda.compiler import PLUGINS

SOURCE = "ops/all_reduce/peers.cu"
THREADS, MAX_BLOCKS = 8, 4  # instead of the GPU's: these are threads of the system

_CUDA = """
#include <atomic>
#include <chrono>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <vector>
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32;
typedef unsigned long long u64;
#define DEVICE static inline
#define __global__
#define __launch_bounds__(n)
struct alignas(16) float4 { float x, y, z, w; };
struct Index { int x; };
struct Block { pthread_barrier_t barrier; std::atomic<int> failed; };
static thread_local Index threadIdx, blockIdx, gridDim;
static thread_local Block* own_block;
static void __syncthreads() { pthread_barrier_wait(&own_block->barrier); }
static bool __syncthreads_and(bool holds) {
  if (!holds) own_block->failed = 1;
  __syncthreads();
  return !own_block->failed;
}
static u32 atomicAdd(u32* at, u32 x) { return __atomic_fetch_add(at, x, __ATOMIC_ACQ_REL); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static void launch_dependents() {}
static void wait_for_dependencies() {}
struct FP32 {
  typedef float Storage;
  static constexpr int bytes = 4;
  static Storage pack(float x) { return x; }
};
struct BF16 {
  typedef u16 Storage;
  static constexpr int bytes = 2;
  static Storage pack(float x) {
    u32 bits;
    std::memcpy(&bits, &x, 4);
    return u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  static float unpack(Storage x) {
    const u32 bits = u32(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
  }
};
"""
_PTX = {  # functions of the source, in C++
    "now_ns": "return std::chrono::steady_clock::now().time_since_epoch().count();",
    "look": "std::this_thread::yield(); return __atomic_load_n(flag, __ATOMIC_ACQUIRE);",
    "raise_flag": "__atomic_store_n(flag, x, __ATOMIC_RELEASE);",
    "read_host": "return __atomic_load_n(lost, __ATOMIC_RELAXED);",
    "write_host": "__atomic_store_n(lost, x, __ATOMIC_RELAXED);",
    "load": "return *from;",
}
_LAUNCH = """
extern "C" void launch(int grid, const long long* bases, State* state, int* lost, const float* x,
                       const float* weight_scale, const float* x_scale,
                       const OUT_TYPE::Storage* bias, OUT_TYPE::Storage* out, int rank, int rows,
                       long long slot_bytes, long long limit_ns) {
  std::vector<Block> blocks(grid);
  std::vector<std::thread> threads;
  for (Block& block : blocks) {
    pthread_barrier_init(&block.barrier, nullptr, THREADS);
    block.failed = 0;
  }
  for (int i = 0; i < grid * THREADS; ++i) {
    threads.emplace_back([=, &blocks] {
      threadIdx.x = i % THREADS, blockIdx.x = i / THREADS, gridDim.x = grid;
      own_block = &blocks[i / THREADS];
      exchange(bases, state, lost, x, weight_scale, x_scale, bias, out, rank, rows, slot_bytes,
               limit_ns);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Block& block : blocks) pthread_barrier_destroy(&block.barrier);
}
"""


def as_cpp() -> str:
    """The source in C++. AssertionError where it has PTX that is not known here."""
    text = (PLUGINS / SOURCE).read_text()
    text = text.replace('#include "backends/cuda/sm90/hopper.cuh"\n', _CUDA)
    text, count = re.subn(r"THREADS = \d+, MAX_BLOCKS = \d+",
                          f"THREADS = {THREADS}, MAX_BLOCKS = {MAX_BLOCKS}", text)  # fmt: skip
    assert count == 1
    for name, body in _PTX.items():
        pattern = rf"(DEVICE [\w ]+\b{name}\([^)]*\) {{\n).*?\n}}\n"
        text, count = re.subn(pattern, rf"\1  {body}\n}}\n", text, flags=re.DOTALL)
        assert count == 1, name
    fence = r'asm volatile\("fence\.acq_rel\.\w+;" ::: "memory"\);'
    text = re.sub(fence, "std::atomic_thread_fence(std::memory_order_seq_cst);", text)
    assert "asm" not in text, "PTX without a counterpart"
    return text + _LAUNCH


def compile_peers(folder: Path, **macros: object) -> ctypes.CDLL:
    """The kernel of these macros; `launch` returns when all of its blocks are done."""
    name = "-".join(f"{key}{value}" for key, value in macros.items())
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(as_cpp())
    defined = [f"-D{key}={value}" for key, value in macros.items()]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w"]
    command = [*find_compiler(), *flags, *defined, str(source), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))
