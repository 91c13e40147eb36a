"""Moves keys and values of an accepted path to the cache positions of its tokens."""
