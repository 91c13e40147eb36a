"""TensorRT: how operators become layers of an `INetworkDefinition` (their `tensorrt.py`)."""
