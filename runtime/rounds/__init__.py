"""Generation led by the device: draft, verify, accept without asking the host."""
