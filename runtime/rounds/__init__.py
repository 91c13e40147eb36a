"""Generation on the device: draft, verify and accept without the host."""
