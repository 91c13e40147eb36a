"""Device rounds: drafting, verification and acceptance on the GPU without waiting for the host."""
