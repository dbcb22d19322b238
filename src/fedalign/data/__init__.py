"""Federations and their data: samples, partitions, generators, readers and downloads."""
