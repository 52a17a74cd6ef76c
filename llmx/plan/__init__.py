"""The planner: time, memory and communication before anything runs."""
