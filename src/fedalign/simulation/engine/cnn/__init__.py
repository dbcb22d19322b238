"""Convolutional models of many clients on a GPU, written out layer by layer."""
