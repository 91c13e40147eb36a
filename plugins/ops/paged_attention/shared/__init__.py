"""What the kernels share: how a context is divided, a launch's arguments, tiles and states."""
