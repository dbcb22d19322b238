"""Hostile simulated clients: what strangers may train on, send and report, to test rules and aggregators against."""
