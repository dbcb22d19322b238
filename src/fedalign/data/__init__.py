"""Where federations' data come from."""
