"""CUDA kernels: those of packed_linear, with this operator's epilogue."""

from llmctl.plugins.packed_linear.kernel import kernels, launches

__all__ = ["kernels", "launches"]
