"""Draft methods, one folder each; `length/` decides how many tokens are drafted."""
