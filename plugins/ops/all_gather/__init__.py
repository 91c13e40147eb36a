"""Logits of the ranks of a tensor-parallel engine, side by side."""
