"""Moves keys and values of an accepted path to where its tokens are."""
