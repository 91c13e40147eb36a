"""Few tokens of few requests, chains or trees: clusters that share a context."""
