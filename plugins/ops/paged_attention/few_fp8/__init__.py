"""Few tokens of requests whose attention has FP8 products."""
