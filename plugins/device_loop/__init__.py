"""The bookkeeping of speculative rounds on the device: inputs of the next pass, and acceptance."""
