"""The algorithms, as generators that yield requests and do no I/O: no PyTorch, no network, no files."""
