"""Reproduces the figures of the paper: their experiments, and a page that says which claims hold."""
