"""Processes, signals, chips, metrics: what surrounds a training step."""
