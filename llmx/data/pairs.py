"""Pairs of answers of which one is preferred: records with `chosen` and `rejected`.

A pair is one document, the tokens of the chosen text and behind them those of the rejected one, so
that both reach a row of a batch together. In the row they are segments of their own.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from llmx.data import chat, tokenizers, turns

FORMAT = "preference"  # `DataConfig.format`
REJECTED = 2  # the bit of a token's weight in shards, beside `shards.LEARNED`
_SIDES = ("chosen", "rejected")
# Segments of a row that holds a pair.
CHOSEN_SEGMENT, REJECTED_SEGMENT = 1, 2


@dataclasses.dataclass(frozen=True)
class RenderedPair:
    """Both texts of a pair."""

    chosen: chat.Rendered
    rejected: chat.Rendered


def read_record(record: Mapping[str, Any], template: chat.Template) -> tuple[bytes, RenderedPair]:
    """The canonical bytes of a record's pair, and its texts.

    A record has `chosen` and `rejected`, each a list of messages or the assistant's answer, and
    with or without them `prompt`, a list of messages or what the user says. The lists may begin
    with the prompt. What both begin with is the prompt's too. Raises ValueError.
    """
    talks = _conversations(record, template.variables)
    raw = json.dumps([talk.canonical().decode() for talk in talks]).encode()
    if len(raw) > chat.MAX_BYTES:
        raise ValueError(f"a pair of more than {chat.MAX_BYTES:,} bytes: write shorter texts")
    if talks[0] == talks[1]:
        raise ValueError("chosen and rejected are the same: remove the record")
    return raw, RenderedPair(*map(template.render_to_learn, talks))


def _conversations(
    record: Mapping[str, Any], known: Collection[str]
) -> list[chat.Conversation]:  # fmt: skip
    if not {"chosen", "rejected"} <= record.keys():
        names = ", ".join(map(repr, list(record)[:10])) or "none"
        raise ValueError(
            f"no pair in the record (its keys: {names}): write prompt, chosen and rejected"
        )
    sides = {name: chat.as_messages(record[name], chat.ASSISTANT) for name in _SIDES}
    prompt = chat.as_messages(record["prompt"], "user") if record.get("prompt") else []
    further = chat.checked(record["messages"]) if record.get("messages") else []
    asked = any(turns.begins_anew(side) for side in sides.values())
    if not prompt and not asked:
        prompt = further
    if not prompt and not asked:
        raise ValueError(
            "neither chosen nor rejected begins with what is asked: add a prompt, or begin both "
            "with it, as lists of messages"
        )
    found = [turns.joined(prompt, sides[name], ("prompt", name)) for name in _SIDES]
    (chosen, first), (rejected, other) = found
    if not turns.all_same(chosen[:first], rejected[:other]):
        raise ValueError("chosen and rejected answer different prompts: write answers to one")
    shared = turns.num_shared(chosen, rejected)
    if not prompt and not shared:
        raise ValueError("chosen and rejected have no common message: write answers to one prompt")
    # The last message of either is its answer, also where the other goes on behind it.
    first = max(first, min(shared, len(chosen) - 1, len(rejected) - 1))
    if further and turns.find(further, chosen) != 0:
        raise ValueError(
            "messages is neither the prompt nor the chosen conversation: remove it from the record"
        )
    return [chat.assembled(side, first, record, known) for side in (chosen, rejected)]


def encode(
    tokenizer: tokenizers.Tokenizer, pair: RenderedPair
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Ids, int32, and weights, uint8, of both texts one behind the other, each with its end."""
    chosen, rejected = (chat.encode_closed(tokenizer, one) for one in (pair.chosen, pair.rejected))
    ids, weights = (np.concatenate(both) for both in zip(chosen, rejected, strict=True))
    weights[len(chosen[0]) :] |= REJECTED
    return ids, weights


def separate(batch: Mapping[str, np.ndarray], rows: np.ndarray, weights: np.ndarray) -> None:
    """Makes the rejected texts of rows of a batch segments of their own, in place.

    `weights`: of the tokens of each row, [rows, T]. Positions begin anew.
    """
    rejected = (weights & REJECTED) > 0
    begins = np.argmax(rejected, axis=1)
    batch["segment_ids"][rows] = np.where(
        rejected, REJECTED_SEGMENT, batch["segment_ids"][rows]
    ).astype(np.int32)
    positions = batch["positions"][rows]
    batch["positions"][rows] = np.where(rejected, positions - begins[:, None], positions)
