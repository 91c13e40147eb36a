"""Residual addition, RMS normalization and FP8 quantization in one pass."""
