"""The CPU backend: a C++ library that runs a whole step in one call."""
