"""Tokens to text as they come: whole characters only, and nothing from a stop string on."""

from collections.abc import Sequence

from llmx.data import tokenizers

_CONTEXT = 8  # tokens before the new ones, on which the text of these may depend
_BROKEN = "\ufffd"  # what an incomplete character decodes to


class TextStream:
    """The text that continues a prompt. All that `add` and `end` return is `text`."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, prompt: Sequence[int], *, stops: Sequence[str] = ()
    ):
        self._tokenizer, self._stops = tokenizer, tuple(filter(None, stops))
        self._ids, self._read = list(prompt), len(prompt)
        self._begin = max(self._read - _CONTEXT, 0)
        # Tokens without text of their own are no context.
        while self._begin and not tokenizer.decode(self._ids[self._begin : self._read]):
            self._begin = max(self._begin - (self._read - self._begin), 0)
        self._held = ""  # may be the beginning of a stop string
        self.text, self.stopped = "", False

    def add(self, ids: Sequence[int]) -> str:
        """The text that further tokens make certain."""
        self._ids += ids
        return self._take(self._decoded(last=False))

    def end(self) -> str:
        """What is left when no tokens follow."""
        piece = self._take(self._decoded(last=True))
        if self.stopped:
            return piece
        self.text, held, self._held = self.text + self._held, self._held, ""
        return piece + held

    def _decoded(self, *, last: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        after = self._tokenizer.decode(self._ids[self._begin :])
        if len(after) <= len(before) or (after.endswith(_BROKEN) and not last):
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _take(self, piece: str) -> str:
        """Adds decoded text; returns what can be shown."""
        if self.stopped:
            return ""
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        longest = max(map(len, self._stops), default=0)
        sizes = range(1, min(longest, len(self._held) + 1))
        beginnings = (
            size for size in sizes
            if any(stop.startswith(self._held[-size:]) for stop in self._stops)
        )  # fmt: skip
        at = min(found) if found else len(self._held) - max(beginnings, default=0)
        shown, self._held = self._held[:at], "" if found else self._held[at:]
        self.text += shown
        return shown
