"""TensorRT without a GPU: a numpy evaluator of its networks and a fake runtime on top."""
