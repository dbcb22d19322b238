"""Callbacks that control a run: early stopping, and the model of the best round."""
