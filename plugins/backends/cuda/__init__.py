"""The CUDA backend: compiling kernels ahead, launching them, running a plan on a GPU."""
