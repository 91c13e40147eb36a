"""Which sequences run in a step and how much of each. Integers only."""
