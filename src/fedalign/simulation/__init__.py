"""Federations in one process: many runs at once, on the CPU or a GPU."""
