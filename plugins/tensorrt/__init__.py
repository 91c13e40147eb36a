"""TensorRT: how operators become layers of an `INetworkDefinition` (`plugins/<op>/tensorrt.py`)."""
