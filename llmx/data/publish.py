"""Token shards whose folder is in an object store: built in a local folder, uploaded as they close.

A shard is uploaded when it is complete, then progress.json, so that another start, also on another
machine, continues. The index is uploaded last: without it the folder is unfinished.
"""

import contextlib
import pathlib
import shutil

from llmx.data import build, remote
from llmx.data import shards as shards_lib

_STAGES = (shards_lib.PROGRESS, shards_lib.INDEX)  # say what the other files are


class Upload:
    """The local folder that stands for a URL, and what of it is uploaded.

    Two machines must not write one URL at a time: a store has no lock that would stop them.
    """

    def __init__(self, url: str, cache_dir: str | pathlib.Path):
        self.url = url.rstrip("/")
        self.folder = remote.local_place(url, pathlib.Path(cache_dir) / "uploads")
        self._sent: set[str] = set()

    def index(self) -> dict | None:
        """The index of a finished folder there. Raises ValueError for a damaged one."""
        if remote.kind_of(f"{self.url}/{shards_lib.INDEX}") != "file":
            return None
        self._fetch(shards_lib.INDEX)
        try:
            return shards_lib.read_index(self.folder)
        finally:
            (self.folder / shards_lib.INDEX).unlink()

    def begin(self, *, overwrite: bool) -> None:
        """Makes the local folder what is there, or removes that. Raises ValueError where other
        files are there."""
        names = sorted(remote.find(self.url)) if remote.kind_of(self.url) == "folder" else []
        if foreign := build.foreign_names(names):
            raise ValueError(
                f"{self.url} holds other files ({', '.join(foreign[:3])}): choose a new or empty "
                "folder"
            )
        if overwrite:
            for name in sorted(names, key=lambda name: name not in _STAGES):
                remote.remove(f"{self.url}/{name}")
            names = []
        self.folder.mkdir(parents=True, exist_ok=True)
        if shards_lib.PROGRESS not in names:
            build.clear(self.folder)
        else:
            self._fetch(*names)
            self._sent = {*names} - {*_STAGES}

    def _fetch(self, *names: str) -> None:
        remote.fetch(self.url, self.folder, keep=lambda name: name in names)

    def send(self) -> None:
        """Uploads the complete files of the local folder, and last what says what they are."""
        stage = next(name for name in reversed(_STAGES) if (self.folder / name).is_file())
        listed = shards_lib.entries_of(self.folder / stage)
        shard_files = {f"{entry['name']}.{kind}" for entry in listed for kind in entry["sha256"]}
        for path in sorted(self.folder.iterdir()):
            unfinished = path.name.startswith("shard-") and path.name not in shard_files
            partial = path.name.startswith(".")
            if not (unfinished or partial or path.name in self._sent or path.name in _STAGES):
                remote.upload(path, f"{self.url}/{path.name}")
                self._sent.add(path.name)
        remote.upload(self.folder / stage, f"{self.url}/{stage}")
        if stage == shards_lib.INDEX:
            remote.remove(f"{self.url}/{shards_lib.PROGRESS}")

    def end(self) -> None:
        """Uploads what is left, and removes the local folder."""
        self.send()
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)
