"""Ways to draft tokens: a folder per method; `length/` decides how many."""
