"""fsspec's object store in the memory of this process."""

import contextlib

import fsspec


@contextlib.contextmanager
def emptied():
    """The store (URLs memory://BUCKET/KEY), empty before and after."""
    files = fsspec.filesystem("memory")

    def empty():
        files.store.clear()
        files.pseudo_dirs[:] = [""]

    empty()
    try:
        yield files
    finally:
        empty()


def objects(files, folder: str) -> dict[str, bytes]:
    """The content of all objects below a folder "BUCKET/KEY", by their names in it."""
    root = f"/{folder}/"
    return {name.removeprefix(root): files.cat_file(name) for name in files.find(root)}
