"""Checkpoints: saved, verified, restored onto any mesh; Hugging Face files."""
