"""Engines opened and ready to run, by backend."""
