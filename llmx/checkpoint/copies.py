"""What a run starts from where that is in an object store: looked at there, read from a local copy.

The names and sizes of the objects tell what is there. Config and tokenizer are copied when they are
asked for, the weights when they are read: of a Hugging Face checkpoint the safetensors, of a work
directory one checkpoint. safetensors and Orbax read local files alone, the first by mapping them.
The copies stay below `FOLDER`, and what has not changed is not copied again.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Mapping

from llmx.checkpoint import directory, hf_reader, identity, mirror, restore
from llmx.data import json_files, remote, tokenizer_files, tokenizers, transient

FOLDER = "~/.cache/llmx/checkpoints"
_SMALL = (hf_reader.CONFIG, hf_reader.INDEX, tokenizers.FILE_NAME, *tokenizer_files.NAMES)
_REMEDY = (
    "name the workdir of a run, or a directory of Hugging Face with config.json and safetensors"
)

Log = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A Hugging Face checkpoint, or a work directory, in a store. `named`: as the user named it."""

    named: str
    url: str
    step: int | None  # of a work directory: the checkpoint, by default the newest
    names: Mapping[str, remote.Status]

    @functools.cached_property
    def steps(self) -> list[int]:
        """Of a work directory: the complete checkpoints, oldest first."""
        return sorted(map(int, mirror.committed(self.names)))

    @property
    def is_hugging_face(self) -> bool:
        has_weights = hf_reader.WEIGHTS in self.names or hf_reader.INDEX in self.names
        return has_weights and hf_reader.CONFIG in self.names and not self._has_checkpoints

    @property
    def folder(self) -> pathlib.Path:
        """Of the copy."""
        return remote.local_place(self.url, FOLDER)

    @property
    def _has_checkpoints(self) -> bool:
        return any(name.startswith(directory.CHECKPOINTS) for name in self.names)

    def problem(self) -> str:
        """Why nothing can start from there, as far as names tell; "" = it can."""
        if not self.names:
            return (
                f"{self.named} does not exist, or holds nothing that may be listed: check its name "
                "and the credentials"
            )
        if self.is_hugging_face:
            if self.step is None:
                return ""
            return (
                f"{self.named} names a step of a Hugging Face checkpoint, which has none: use "
                f"{self.url}"
            )
        if not self._has_checkpoints:
            return f"{self.named} holds no checkpoints: {_REMEDY}"
        if not self.steps:
            return (
                f"{self.named} has no complete checkpoint (one with its "
                f"{mirror.directory.MARKER}): wait for the first one, or upload it again"
            )
        if self.step is None or self.step in self.steps:
            return ""
        return f"{self.named}: no checkpoint of that step is there: there are {self.steps}"

    def small(self) -> str:
        """A local folder with its config and its tokenizer. Raises ValueError."""
        return self._fetch(lambda name: name in _SMALL)

    def whole(self, step: int | None, log: Log) -> str:
        """A local folder with the weights too, of a work directory those of a `step`.

        Raises ValueError, also where the disk has no room or files are missing.
        """
        if self.is_hugging_face:
            parts = self._weight_files()
            wanted = lambda name: name in _SMALL or name in parts  # noqa: E731
        else:
            lead = f"{directory.CHECKPOINTS}{step}/"
            wanted = lambda name: name in _SMALL or name.startswith(lead)  # noqa: E731
        size = sum(state.num_bytes for name, state in self.names.items() if wanted(name))
        what = self.url if step is None else f"{self.url}@{step}"
        log(f"copying {what} ({size / 2**30:.2f} GiB) to {self.folder}, what is not there yet")
        return self._fetch(wanted)

    def _weight_files(self) -> set[str]:
        """The names of the safetensors. Raises ValueError where the index names others."""
        if hf_reader.WEIGHTS in self.names:
            return {hf_reader.WEIGHTS}
        index = pathlib.Path(self.small(), hf_reader.INDEX)
        remedy = "upload the checkpoint again"
        found = json_files.read_object(index, remedy=remedy).get("weight_map")
        files = set(found.values()) if isinstance(found, dict) else set()
        if missing := files - self.names.keys():
            raise ValueError(
                f"{self.named} lacks {hf_reader.listed(missing)}, which its {hf_reader.INDEX} "
                f"names: {remedy}"
            )
        return files

    def _fetch(self, wanted: Callable[[str], bool]) -> str:
        try:
            remote.fetch(self.url, self.folder, keep=wanted)
        except OSError as error:
            what = f"{self.named} cannot be copied to {self.folder}"
            remedy = "check the credentials and the space on that disk"
            raise transient.refusal(what, error, remedy) from error
        return str(self.folder)


def find(option: str, place: str) -> Stored:
    """What is at a URL, or at URL@STEP. `option`: how it was given, for messages.

    Raises ValueError where it cannot be listed.
    """
    url, step = identity.origin(place)
    if found := remote.problems(option, url):
        raise ValueError(found[0])
    try:
        names = remote.find(url)
    except FileNotFoundError:
        names = {}
    except OSError as error:
        remedy = "check its name and the credentials"
        raise transient.refusal(f"{option}{place} cannot be listed", error, remedy) from error
    return Stored(f"{option}{place}", url.rstrip("/"), step, names)


def local(option: str, place: str, log: Log) -> tuple[str, int | None]:
    """A local work directory or Hugging Face checkpoint, and the step if one is named.

    A `place` that is a URL is copied, the newest checkpoint where it names none. In a run of
    several processes each must call it: all take the step that process 0 finds. Raises ValueError.
    """
    if not remote.is_url(place):
        return identity.origin(place)
    stored = find(option, place)
    if text := stored.problem():
        raise ValueError(text)
    if stored.is_hugging_face:
        return stored.whole(None, log), None
    step = stored.steps[-1] if stored.step is None else stored.step
    (step,) = restore.agree_on_steps([step])
    return stored.whole(step, log), step


def name_on_hub(place: str) -> str:
    """The name of a repository of models: "OWNER/NAME" of "hf://OWNER/NAME", "" of others."""
    found = re.fullmatch(r"hf://([^/@]+/[^/@]+)/?", place)
    return found[1] if found and not found[1].startswith(("datasets/", "spaces/")) else ""
