"""CUDA kernels: those of packed_linear, with this operator's epilogue."""

from llmctl.plugins.ops.packed_linear.kernel import OWN_ROLES, kernels, launches

__all__ = ["OWN_ROLES", "kernels", "launches"]
