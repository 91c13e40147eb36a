"""Several tokens of a request, chains or trees, in a long context."""
