"""Metrics of the users' choice, measured on the clients' data after every round."""
