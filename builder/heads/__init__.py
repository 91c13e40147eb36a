"""Heads: graphs beside the base graph of an engine, a module for each build mode that has some."""
