"""Which sequences run in a step, and how many tokens of each. Integers only."""
