"""Smaller models out of trained ones: what products take, and weights of fewer bits."""
