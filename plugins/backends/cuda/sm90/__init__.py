"""Headers shared by the CUDA C++ kernels for compute capability 9.0 (Hopper)."""
