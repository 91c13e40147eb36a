"""Profiling: where the time goes."""
