"""MXFP4 weights: 4-bit codes in blocks of 32 that share a power of two."""
