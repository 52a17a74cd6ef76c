"""What a folder or glob of an object store holds, in the order and the words of `sources`."""

from collections.abc import Iterator, Mapping

from llmx.data import remote, saved_datasets, transient

SAVED_DATASET = "saved dataset: "  # before what is wrong with one


def walk(root: str) -> Iterator[tuple[str, str]]:
    """(URL, what it is) below a folder, in the order of the names, files before subfolders."""
    names, seen = remote.find(root), set()
    saved = _saved(root, names)
    for name in sorted(names, key=_order):
        *folders, last = name.split("/")
        above = ["/".join(folders[:i]) for i in range(len(folders) + 1)]
        hidden = next((i for i, folder in enumerate(folders) if folder.startswith(".")), None)
        if hidden is not None:
            if above[hidden + 1] not in seen:
                yield f"{root}/{above[hidden + 1]}", "hidden folder"
            seen.add(above[hidden + 1])
        elif "__pycache__" in folders:
            continue
        elif last.startswith("."):
            yield f"{root}/{name}", "hidden"
        elif inside := [folder for folder in above if folder in saved]:
            if inside[0] not in seen:
                yield from saved[inside[0]]
            seen.add(inside[0])
        else:
            yield f"{root}/{name}", "file"


def _order(name: str) -> list[tuple[bool, str]]:
    *folders, last = name.split("/")
    return [*((True, folder) for folder in folders), (False, last)]


def _saved(root: str, names: Mapping[str, object]) -> dict[str, list[tuple[str, str]]]:
    """The entries of each folder that is a saved dataset; "" is the root."""
    folders: dict[str, set[str]] = {}
    for name in names:
        folder, _, last = name.rpartition("/")
        folders.setdefault(folder, set()).add(last)
    return {
        folder: _entries(f"{root}/{folder}".rstrip("/"), inside)
        for folder, inside in sorted(folders.items())
        if saved_datasets.is_saved(inside)
    }


def _entries(folder: str, inside: set[str]) -> list[tuple[str, str]]:
    try:
        chosen = saved_datasets.arrow_names(folder)
        if not chosen:  # of a single split
            (split,) = saved_datasets.split_names(folder)
            return list(walk(f"{folder}/{split}"))
    except ValueError as error:
        if transient.is_transient(error):
            raise
        return [(folder, f"{SAVED_DATASET}{error}")]
    files = [
        (f"{folder}/{name}", "file" if name in inside else "missing file of a dataset")
        for name in chosen
    ]
    others = sorted(name for name in inside - {*chosen} if not name.endswith(".json"))
    return [*files, *((f"{folder}/{name}", "beside a saved dataset") for name in others)]
