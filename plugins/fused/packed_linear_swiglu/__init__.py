"""Gate and up projections with SwiGLU (and FP8 quantization) in the epilogue."""
