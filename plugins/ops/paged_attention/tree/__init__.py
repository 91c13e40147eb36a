"""Trees of tokens, and chains of many requests."""
