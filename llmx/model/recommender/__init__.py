"""Models of clicks: a dense network over numbers and the rows of sparse tables.

`recommender.make` gives one as functions of its parameters. Where the rows come from is not these
modules' matter: they take them looked up, by feature.
"""
