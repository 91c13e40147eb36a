"""Few tokens per request, with FP8 products."""
