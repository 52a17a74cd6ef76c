"""Text to batches: sources, tokenizers, token shards, the held-out split, packing and the loader.

Reading order: `config` (what a user sets), `sources` (which files), `documents` (what is in them),
`tokenizers`, `shards` (the files on disk), `build` (documents to shards, resumable), `split` (train
and held-out), `packing` (documents to rows), `dataset` (the sample order), `loader` (the iterator
of a process).
`python -m llmx.data --help` writes token shards ahead of time. docs/data.md is the manual.
"""
