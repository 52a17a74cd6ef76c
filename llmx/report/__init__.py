"""Comparison of runs on one HTML page: python -m llmx.report WORKDIR WORKDIR ..."""
