"""SiLU(gate) * up, with optional FP8 quantization."""
