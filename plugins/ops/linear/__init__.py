"""Matrix product with weights in FP32, BF16, FP16 or FP8."""
