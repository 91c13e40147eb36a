"""Sums over the ranks of a tensor-parallel engine."""
