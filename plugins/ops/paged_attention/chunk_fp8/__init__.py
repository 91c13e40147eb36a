"""Context chunks with FP8 products."""
