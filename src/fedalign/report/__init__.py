"""Plots, tables and an HTML page from the output folders of finished runs."""
