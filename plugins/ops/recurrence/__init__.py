"""A step of a recurrent drafter: the next state of every row, behind the context that it keeps."""
