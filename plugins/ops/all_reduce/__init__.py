"""Sums over the ranks of a tensor-parallel engine; TensorRT engines have them."""
