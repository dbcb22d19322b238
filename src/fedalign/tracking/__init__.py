"""Trackers: callbacks that write runs for TensorBoard, MLflow and Weights & Biases."""
