"""The files of a Hugging Face checkpoint beside its tensors: tokenizer, generation, ids, dtype.

A run keeps those of the checkpoint that it comes from beside its tokenizer.json, its config.json
under the name of `tokenizer_files.IMPORTED_CONFIG`. Export writes them back as they were.
"""

import json
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llmx.data import tokenizer_files, tokenizers
from llmx.model.families import ModelConfig

_IDS = ("bos_token_id", "pad_token_id", "eos_token_id")


def read(directory: str | pathlib.Path) -> dict[str, bytes]:
    """What a run keeps of a checkpoint's directory besides tokenizer.json, by its name there."""
    config = pathlib.Path(directory, "config.json").read_bytes()
    return tokenizer_files.read(directory) | {tokenizer_files.IMPORTED_CONFIG: config}


def special_ids(
    files: Mapping[str, bytes], *, end_token: int | None, ids: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """bos_token_id, pad_token_id and eos_token_id for a config.json.

    Args:
      end_token: ends a text, where the run's own checkpoint does not say what does.
      ids: {"bos_token_id": 1, ...} of the tokenizer, where the checkpoint has none.
    """
    imported = tokenizer_files.imported_config(files)
    # Without these keys the defaults of some families end texts at token 1 or 2.
    found: dict[str, Any] = dict.fromkeys(_IDS) | dict(ids or {}) | {"eos_token_id": end_token}
    for key in _IDS:
        given = tokenizer_files.ids(imported, key, tokenizer_files.IMPORTED_CONFIG)
        if given or (key in imported and key != "eos_token_id"):  # null = there is no such token
            found[key] = imported[key]
    return found


def borrowed(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a run that has only its tokenizer from a checkpoint: of the config.json there
    the ids of tokens alone."""
    imported = tokenizer_files.imported_config(files)
    ids = {key: imported[key] for key in _IDS if key in imported}
    return dict(files) | {tokenizer_files.IMPORTED_CONFIG: json.dumps(ids).encode()}


def with_ends(
    config: Mapping[str, Any], files: Mapping[str, bytes], ends: Sequence[int]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A config.json and the files beside it in which generation ends at `ends`, too.

    transformers goes by generation_config.json where there is one, and other programs by either.
    """
    name = tokenizer_files.GENERATION
    own = {key: config[key] for key in _IDS if config.get(key) is not None}

    def extended(one: Mapping[str, Any]) -> dict[str, Any]:
        known, before = (tokenizer_files.ids(x, "eos_token_id", name) for x in (one, config))
        if set(ends) <= set(known):
            return dict(one)
        found = list(dict.fromkeys([*(known or before), *ends]))
        return {**one, "eos_token_id": found if found[1:] else found[0]}

    generation = json.loads(files[name]) if name in files else own
    if (found := extended(generation)) != generation or (ends and name not in files):
        files = {**files, name: (json.dumps(found, indent=2) + "\n").encode()}
    return extended(config), dict(files)


def dtype(files: Mapping[str, bytes], known: Collection[str]) -> str:
    """The dtype of the checkpoint that a run comes from; "float32" without one, or if unknown."""
    imported = tokenizer_files.imported_config(files)
    name = imported.get("dtype") or imported.get("torch_dtype")
    return name if name in known else "float32"


def ids_of(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """bos_token_id and pad_token_id of a tokenizer, as far as it names them."""
    named = {f"{key}_id": tokenizer.names.get(key) for key in ("bos_token", "pad_token")}
    special = tokenizer.special
    return {key: special[token] for key, token in named.items() if token in special}


def write(
    directory: pathlib.Path, file: pathlib.Path, files: Mapping[str, bytes], model: ModelConfig,
    end_token: int | None,
) -> None:  # fmt: skip
    """tokenizer.json and the files beside it as they are.

    Where no tokenizer_config.json is among them, one is written by which transformers reads the
    tokenizer.json.
    """
    raw = file.read_bytes()
    content = json.loads(raw)
    if "model" not in content:
        remedy = "give a tokenizer.json of that library, or none"
        raise ValueError(f"{file} is not a tokenizer of Hugging Face `tokenizers`: {remedy}")
    (directory / tokenizers.FILE_NAME).write_bytes(raw)
    for name, kept in files.items():
        if name != tokenizer_files.IMPORTED_CONFIG:
            (directory / name).write_bytes(kept)
    if tokenizer_files.CONFIG not in files:
        special = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.max_positions,
            "clean_up_tokenization_spaces": False, "eos_token": special.get(end_token),
        }  # fmt: skip
        (directory / tokenizer_files.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
