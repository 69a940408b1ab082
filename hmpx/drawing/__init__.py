"""Drawing: the autograd graph of a result, with its casts."""
