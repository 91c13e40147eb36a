"""Context chunks whose products are of FP8 numbers."""
