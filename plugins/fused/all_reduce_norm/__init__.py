"""The sum over ranks with the norm that follows it, in the launch in which partial sums arrive."""
