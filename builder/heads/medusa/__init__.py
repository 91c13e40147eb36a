"""Medusa heads as a part of an engine: reading them, and the graph that they are."""
