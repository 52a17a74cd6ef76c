"""What a tokenizer.json may ask for: the `tokenizers` library takes any, and a few kB can fill the
memory, or make it abort.

Its tables are as long as the largest id. Its steps run one after another on all of a text, and some
make a text longer each time.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

MAX_VOCAB_SIZE = 1 << 24
SPARE_IDS = 1 << 16  # beside twice the number of tokens: files leave some ids out
MAX_STEPS = 200  # of each kind; files of models have up to 10
MAX_PIECES = 10_000  # numbers and names in a post-processor
MAX_GROWTH = 256  # of a text by all steps; those of models come to 8
# What runs one behind the other: on a text, on its ids, and on the text of ids.
_CHAINS = (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",))


def problem(parsed: Any) -> str:
    """What a parsed tokenizer.json asks for that is too much, with the limit; "" = nothing.

    All else that may be wrong with it is left to the library.
    """
    if not isinstance(parsed, dict):
        return ""
    return _id_problem(parsed) or _step_problem(parsed) or _empty_problem(parsed)


def _id_problem(parsed: Mapping[str, Any]) -> str:
    model, added = parsed.get("model"), parsed.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    added = added if isinstance(added, list) else []
    count = len(added) + (len(vocab) if isinstance(vocab, dict | list) else 0)
    ids = [one.get("id") for one in added if isinstance(one, dict)]
    ids += vocab.values() if isinstance(vocab, dict) else []
    ids += (value for value in _values(parsed.get("post_processor")))
    largest = max((one for one in ids if type(one) is int), default=0)
    most = min(2 * count + SPARE_IDS, MAX_VOCAB_SIZE)
    if largest < most:
        return ""
    limit = "" if most == MAX_VOCAB_SIZE else f", of a file with {count:,} tokens"
    return f"it has the token id {largest:,}, above {most - 1:,}, the largest{limit}"


def _step_problem(parsed: Mapping[str, Any]) -> str:
    for keys in _CHAINS:
        steps = [step for key in keys for step in _steps(parsed.get(key))]
        name = " and ".join(keys)
        if len(steps) > MAX_STEPS:
            return f"its {name} has {len(steps):,} steps, above {MAX_STEPS}, the most"
        if (found := math.prod(map(_growth, steps))) > MAX_GROWTH:
            return (
                f"its {name} can make a text {found:,.0f} times as long, above {MAX_GROWTH}, the "
                "most"
            )
    if sum(1 for _ in _values(parsed.get("post_processor"))) > MAX_PIECES:
        return f"its post_processor has more than {MAX_PIECES:,} values, the most"
    return ""


def _empty_problem(parsed: Mapping[str, Any]) -> str:
    """The library finds a token of no characters everywhere, for ever."""
    added, steps = parsed.get("added_tokens"), parsed.get("normalizer")
    tokens = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    texts = [one.get("content") for one in tokens if one.get("normalized") and steps]
    if not texts or not all(isinstance(text, str) for text in texts):
        return ""
    import tokenizers

    model = {"type": "BPE", "vocab": {}, "merges": []}
    alone = json.dumps({"version": "1.0", "model": model, "normalizer": steps})
    try:
        normalizer = tokenizers.Tokenizer.from_str(alone).normalizer
    except Exception:  # the library's own; it says so of the whole file
        return ""
    empty = [text for text in texts if text and not normalizer.normalize_str(text)]
    return f"its normalizer leaves nothing of its added token {empty[0]!r}" if empty else ""


def _steps(value: Any) -> Iterator[Mapping[str, Any]]:
    """The objects with a type in a part of the file, however nested."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict) and "type" in one:
            yield one
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one


def _growth(step: Mapping[str, Any]) -> float:
    """How much longer a step can make a text."""
    if step["type"] == "ByteLevel":
        return 2.0  # characters that are no ASCII
    if step["type"] == "TemplateProcessing" and isinstance(step.get("single"), list):
        return max(sum("Sequence" in str(piece) for piece in step["single"][:MAX_PIECES]), 1.0)
    if step["type"] != "Replace" or not isinstance(step.get("content"), str):
        return 1.0
    size, pattern = len(step["content"]), step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(size / len(text), 1.0)
    # An expression may match one character; nothing, between any two.
    return max(float(size), 1.0) if text is None else 1.0 + size


def _values(value: Any) -> Iterator[Any]:
    """The values of a part of the file that hold no others."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
        else:
            yield one
