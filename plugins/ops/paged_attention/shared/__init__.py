"""What the kernels share: how a context is divided, a binary's name and macros, tiles, states."""
