"""Two activations side by side."""
