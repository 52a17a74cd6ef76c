"""Attention: one kernel a file, and how split positions see each other."""
