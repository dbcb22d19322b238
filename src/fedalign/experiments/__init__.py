"""Experiments: settings in TOML files, run arm by arm and seed by seed into a folder."""
