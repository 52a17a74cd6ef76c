"""Token shards whose folder is in an object store: built in a local folder, uploaded as they close.

A shard is uploaded when it is complete, then progress.json, so that another start, also on another
machine, continues. The index is uploaded last: without it the folder is unfinished. Where the local
folder is further than the store, as after an upload that failed, it counts.
"""

import contextlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping

from llmx.data import build, remote, transient
from llmx.data import shards as shards_lib

_STAGES = (shards_lib.PROGRESS, shards_lib.INDEX)  # say what the other files are


def _listed(stage: Mapping) -> set[str]:
    """The files of the shards that an index or the progress lists."""
    entries = stage.get("shards", [])
    return {f"{entry['name']}.{kind}" for entry in entries for kind in entry["sha256"]}


def _continues(mine: Mapping, theirs: Mapping) -> bool:
    """Whether what is here is the same work as what is there, and as far at least."""
    if not theirs:
        return True
    same = mine["identity"] == theirs["identity"]
    return same and mine["shards"][: len(theirs["shards"])] == theirs["shards"]


class Upload:
    """The local folder that stands for a URL, and what of it is uploaded.

    Two machines must not write one URL at a time: a store has no lock that would stop them.
    """

    def __init__(self, url: str, cache_dir: str | pathlib.Path):
        self.url = url.rstrip("/")
        self.folder = remote.local_place(url, pathlib.Path(cache_dir) / "uploads")
        self._sent: set[str] = set()

    def _refusing(self) -> contextlib.AbstractContextManager:
        return remote.writing(f"--output {self.url}", f"the space for {self.folder}")

    def index(self) -> dict | None:
        """The index of a finished folder there. Raises ValueError for a damaged one."""
        with self._refusing():
            return self._read(shards_lib.INDEX, shards_lib.read_index)

    def begin(self, identity: str, *, overwrite: bool) -> dict | None:
        """Makes the local folder what is there, unless it is further with the same work; or removes
        both. The index, where the folder is finished and only has to be uploaded.

        identity: of the work. Raises ValueError where other files are there.
        """
        with self._refusing():
            return self._begin(identity, overwrite=overwrite)

    def _begin(self, identity: str, *, overwrite: bool) -> dict | None:
        names = sorted(remote.find(self.url)) if remote.kind_of(self.url) == "folder" else []
        if foreign := build.foreign_names(names):
            raise ValueError(
                f"{self.url} holds other files ({', '.join(foreign[:3])}): choose a new or empty "
                "folder"
            )
        if overwrite:
            for name in sorted(names, key=lambda name: name not in _STAGES):
                remote.remove(f"{self.url}/{name}")
            build.clear(self.folder)
            return None
        theirs = self._read(shards_lib.PROGRESS, build.read_progress) or {}
        there = _listed(theirs)
        index = self._finished_here(identity)
        mine = index or self._progress_here(theirs)
        lost = {name for name in _listed(mine) if not (self.folder / name).is_file()}
        if mine and _continues(mine, theirs) and (lost <= {*names} or not theirs):
            if lost := lost & {*names}:
                self._fetch(*lost)
        elif theirs:
            if missing := there - {*names}:
                raise transient.Transient(
                    f"the listing of {self.url} lacks {min(missing)}, which its "
                    f"{shards_lib.PROGRESS} names: the store does not list what it holds"
                )
            (self.folder / shards_lib.INDEX).unlink(missing_ok=True)
            self._fetch(*names)
        self._sent = there & {*names}
        return index

    def _finished_here(self, identity: str) -> dict | None:
        """The index of the local folder, where that is finished and whole."""
        with contextlib.suppress(ValueError):
            index = shards_lib.read_index(self.folder)
            if index["identity"] == identity:
                shards_lib.open_shards(self.folder)
                return index
        return None

    def _progress_here(self, theirs: dict) -> dict:
        try:
            return build.read_progress(self.folder)
        except ValueError:
            if not theirs:
                raise
            return {}

    def _read(self, name: str, read: Callable[[pathlib.Path], dict]) -> dict | None:
        """What `read` makes of a folder with this file of the store; None where that has none.

        It asks for the file itself: a listing may lack it.
        """
        if remote.kind_of(f"{self.url}/{name}") != "file":
            return None
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as beside:
            remote.fetch_file(f"{self.url}/{name}", pathlib.Path(beside, name))
            return read(pathlib.Path(beside))

    def _fetch(self, *names: str) -> None:
        remote.fetch(self.url, self.folder, keep=lambda name: name in names)

    def send(self) -> None:
        """Uploads the complete files of the local folder, and last what says what they are."""
        with self._refusing():
            self._send()

    def _send(self) -> None:
        stage = next(name for name in reversed(_STAGES) if (self.folder / name).is_file())
        shard_files = _listed({"shards": shards_lib.entries_of(self.folder / stage)})
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
