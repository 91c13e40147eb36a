"""Benchmarks, each with what it measures against."""
