"""One file an operation: the PyTorch reference that defines it, and the faster versions of it."""
