"""Causal attention over the paged KV cache: context chunks, generation and verification.

kernel.py             which kernel computes which requests of a step; all binaries
ways.py               each kernel's launch for a step, or that it cannot compute it
launch_arguments.py   the arguments of all launches
fp8_context.py        which tokens have FP8 products

batch/ chunk/ chunk_fp8/ few_fp8/ generation/ long/ long_batch/ tree/ verification/
                      a CUDA kernel each, for Hopper: its source, binaries and launches
triton/               the kernels for everything else, and the order of operations that all follow
shared/               how a context is divided, tiles and states; it imports none of the others
"""
