"""The model: families as data, a decoder in Flax, and its parts as functions."""
