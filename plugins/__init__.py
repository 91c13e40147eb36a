"""Computation on tensors: one folder per operator, with its spec, reference and kernels."""
