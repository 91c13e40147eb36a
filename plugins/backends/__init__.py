"""Who executes a plan: a folder per backend."""
