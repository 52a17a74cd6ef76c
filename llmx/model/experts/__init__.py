"""Routed experts: who goes where, how rows travel, and their products."""
