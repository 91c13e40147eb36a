"""The TensorRT backends: building real shapes, checking engines on a GPU."""
