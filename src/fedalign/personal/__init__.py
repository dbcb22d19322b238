"""Personal models: what every client makes of the served model for itself, after the last round."""
