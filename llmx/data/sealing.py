"""A copy of a `tokenizers` file whose special tokens have names that no text can hold.

In the copy a literal "</s>" is nothing but characters, to the vocabulary of the model too: a
Unigram model would otherwise find its own piece "</s>" in any text. Who knows the new name of a
token can still write it, and gets the token's own id.
"""

import json
import secrets
from collections.abc import Collection, Mapping
from typing import Any

# Digits keep their form in all normalizers, and the private characters keep them from joining.
_BEGIN, _END = "\U000f0000", "\U000f0001"


def seal(text: str, special: Collection[str]) -> tuple[str, dict[str, str]]:
    """The text of a tokenizer.json with other names for `special`, and {token: other name}."""
    content = json.loads(text)
    secret = {token: f"{_BEGIN}{secrets.randbits(64)}{_END}" for token in special}
    for token in content["added_tokens"]:
        token["content"] = secret.get(token["content"], token["content"])
    model = content["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [piece, score] by id
        model["vocab"] = [[secret.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {secret.get(piece, piece): index for piece, index in vocab.items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = secret.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, secret)]
    # It would name tokens that are no longer there, and nothing is added to these texts.
    if not _only_bytes(content.get("post_processor")):
        content["post_processor"] = None
    return json.dumps(content), secret


def _makes(merge: Any, secret: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in secret or right in secret or left + right in secret


def _only_bytes(post_processor: Any) -> bool:
    return isinstance(post_processor, dict) and post_processor.get("type") == "ByteLevel"
