"""Folders that `save_to_disk` of the Hugging Face `datasets` library wrote, read without it.

A dataset is a folder of Arrow files, named by its state.json; one of several splits has a folder
for each, named by dataset_dict.json.
"""

import os
from collections.abc import Collection

from llmx.data import json_files, remote

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_REMEDY = "save the dataset again (save_to_disk)"


def is_saved(names: Collection[str]) -> bool:
    """Whether a folder with these names is a saved dataset, or one of splits."""
    return SPLITS in names or (STATE in names and INFO in names)


def split_names(folder: str) -> list[str]:
    """The splits of a saved dataset, [] where it has none. Raises ValueError for a bad list."""
    path = os.path.join(folder, SPLITS)
    here = remote.kind_of(path) == "file" if remote.is_url(path) else os.path.isfile(path)
    if not here:
        return []
    splits = json_files.read_object(path, remedy=_REMEDY).get("splits")
    if not isinstance(splits, list) or not splits or not all(map(json_files.is_plain_name, splits)):
        raise ValueError(f"{path} names no splits: {_REMEDY}")
    return splits


def arrow_names(folder: str) -> list[str]:
    """The Arrow files of a saved dataset in the order of its rows; [] for one of a single split.

    Other Arrow files beside them are what `datasets` itself caches. Raises ValueError for several
    splits, of which one must be chosen, and for a folder that is not as `datasets` writes it.
    """
    if splits := split_names(folder):
        if len(splits) > 1:
            raise ValueError(
                f"{folder} is a dataset of the splits {', '.join(map(repr, splits))}: name the one "
                f"to read, such as {os.path.join(folder, splits[0])!r}"
            )
        return []
    path = os.path.join(folder, STATE)
    state = json_files.read_object(path, remedy=_REMEDY)
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{path}: the rows are chosen by a table of indices, which is not read: write them out "
            "(flatten_indices) and save the dataset again"
        )
    files = state.get("_data_files")
    names = [one.get("filename") if isinstance(one, dict) else None for one in files or ()]
    if not isinstance(files, list) or not names or not all(map(json_files.is_plain_name, names)):
        raise ValueError(f"{path} names no Arrow files: {_REMEDY}")
    return names
