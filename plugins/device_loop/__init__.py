"""Kernels of speculative rounds on the device: the inputs of the next pass, and acceptance."""
