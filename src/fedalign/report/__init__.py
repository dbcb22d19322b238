"""Plots, tables and a page from the folders that runs leave behind."""
