"""Ahead-of-time compilation for machines that are not here, and reports of what they would do."""
