"""Records of clicks as data: a label, numbers and ids, one record a row of the batch.

`schema` says what a record has, `tsv`, `parquet` and `generated` make chunks of records, `shards`
keeps them in memory-mapped files, and `dataset` gives the training loop its rows.
"""
