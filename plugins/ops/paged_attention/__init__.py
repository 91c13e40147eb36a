"""Causal attention over the paged KV cache: context chunks, generation and verification."""
