"""SiLU, with an optional residual added behind it."""
