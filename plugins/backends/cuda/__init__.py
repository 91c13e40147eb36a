"""The CUDA backend: compiling kernels ahead of time, launching them, running a plan on a GPU."""
