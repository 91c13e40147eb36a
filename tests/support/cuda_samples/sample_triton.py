"""A Triton kernel with everything the harness must handle: helpers, reductions, FP8, PDL."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _square(x):
    return x * x


@triton.jit
def scaled_norm(x_ptr, scale_ptr, out_ptr, rows, epsilon, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """out[row] = fp8(x[row] / rms(x[row]) / scale)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row * WIDTH + columns, mask=row < rows).to(tl.float32)
    mean = tl.sum(_square(x), axis=0) / WIDTH
    y = x * tl.rsqrt(mean + epsilon) / tl.load(scale_ptr)
    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
    tl.store(out_ptr + row * WIDTH + columns, y.to(tl.float8e4nv), mask=row < rows)


@triton.jit
def product(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out [M, N] float32 = a [M, K] @ b [N, K]^T, FP8 inputs, one thread block."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[None, :] * K + k[:, None])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))
