"""Programs for developers; run from the repository's root: `python -m scripts.<folder>.<name>`."""
