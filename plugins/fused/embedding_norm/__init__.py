"""Rows of the embedding table and what the first norm makes of them, in one pass."""
