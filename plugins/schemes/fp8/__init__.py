"""FP8 weights with one scale per tensor or per row."""
