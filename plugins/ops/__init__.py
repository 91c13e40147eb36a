"""Operators, a folder each: spec, reference, kernels by backend."""
