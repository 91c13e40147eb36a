"""Matrix product with a weight that was packed for the tensor core's 64-row operand."""
