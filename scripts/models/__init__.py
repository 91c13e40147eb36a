"""Checkpoints of known shapes with random or planted weights."""
