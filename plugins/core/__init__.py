"""Shared by every operator and backend: specs, the table of operators, calls, random examples."""
