"""The engines that train and evaluate clients: a plain reference loop, and a batched engine for CPU and GPU."""
