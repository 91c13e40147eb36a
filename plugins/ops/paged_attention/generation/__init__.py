"""Few tokens at low latency: thread blocks that split a context and merge it."""
