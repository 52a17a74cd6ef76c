"""Sparse tables: rows looked up by id, split over devices, of which a step touches few."""
