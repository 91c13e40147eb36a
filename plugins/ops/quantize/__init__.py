"""FP8 quantization of an activation that no producer could quantize."""
