"""The bookkeeping of speculative rounds on the device: what to feed next, and what was accepted."""
