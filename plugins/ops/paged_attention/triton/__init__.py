"""The kernels in Triton: every GPU, every head size, windows."""
