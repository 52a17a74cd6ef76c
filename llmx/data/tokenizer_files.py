"""The files beside a tokenizer.json: which are kept, and what they say.

`tokenizer_config.json` and `special_tokens_map.json` name the special tokens and hold the chat
template, as does `chat_template.jinja`; `generation_config.json` has the ids that end a generated
text. `hf_config.json` is the config.json of the checkpoint that a run was imported from.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from llmx.data import json_files

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
IMPORTED_CONFIG = "hf_config.json"
_ADDED = "added_tokens.json"
_OLD_TEMPLATE = "chat_template.json"
NAMES = (
    CONFIG, SPECIAL_TOKENS, _ADDED, TEMPLATE, _OLD_TEMPLATE, GENERATION,
    IMPORTED_CONFIG, "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tiktoken.model", "tekken.json",
)  # fmt: skip
MAX_BYTES = 128 << 20
NAMED_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")  # of how a token is found
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
_REMEDY = "download the file again, or remove it"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the files beside a tokenizer.json say."""

    names: Mapping[str, str]  # {"bos_token": "<s>", ...}
    special: tuple[str, ...]  # further special tokens
    # {"<s>": {"rstrip": True}, ...}: tokens that a tokenizer.json may lack, in the order in which
    # they get ids, and tokens that are found as said here, whatever it says.
    added: Mapping[str, Mapping[str, bool]]
    listed: Mapping[str, Mapping[str, bool]]
    stop_ids: tuple[int, ...]  # of generation_config.json, or of the checkpoint's config.json
    template: str  # the chat template; "" = none


def read(folder: str | os.PathLike) -> dict[str, bytes]:
    """The content of those files of a folder that belong to its tokenizer; of a Hugging Face
    checkpoint config.json too, as `IMPORTED_CONFIG`."""
    paths = {name: pathlib.Path(folder, name) for name in NAMES}
    if not paths[IMPORTED_CONFIG].is_file():
        paths[IMPORTED_CONFIG] = pathlib.Path(folder, "config.json")
    found = {
        name: json_files.read_bytes(path, remedy=_REMEDY, max_bytes=MAX_BYTES)
        for name, path in paths.items() if path.is_file()
    }  # fmt: skip
    own = paths[IMPORTED_CONFIG].name == "config.json" and IMPORTED_CONFIG in found
    if own and b'"model_type"' not in found[IMPORTED_CONFIG]:  # that of a run
        del found[IMPORTED_CONFIG]
    return found


def parse(files: Mapping[str, bytes], where: str | os.PathLike) -> Settings:
    """What files of a folder `where` say. Raises ValueError, naming the file, where one is bad."""
    config, generation, imported, template = (
        _object(files, name, where) for name in (CONFIG, GENERATION, IMPORTED_CONFIG, _OLD_TEMPLATE)
    )
    stops = generation if generation.get("eos_token_id") is not None else imported
    return Settings(
        *_tokens(files, config, where), ids(stops, "eos_token_id", where),
        _template(files, config, template, where),
    )  # fmt: skip


def _tokens(
    files: Mapping[str, bytes], config: Mapping[str, Any], where: str | os.PathLike
) -> tuple[dict[str, str], tuple[str, ...], dict[str, Mapping], dict[str, Mapping]]:
    """`names`, `special`, `added` and `listed` of `Settings`, by the rules of transformers."""
    older, added = (_object(files, name, where) for name in (SPECIAL_TOKENS, _ADDED))
    path, decoder = pathlib.Path(where, CONFIG), config.get("added_tokens_decoder")
    if decoder is not None:  # then it does not read these two
        older, added = {}, {}
    extra = [config.get(_EXTRA), older.get(_EXTRA)]
    if not isinstance(extra[0], list) or not extra[0]:
        extra.insert(0, config.get(_OLD_EXTRA))
    if not any(isinstance(one, list) and one for one in extra):
        extra.append(older.get(_OLD_EXTRA))
    named = {name: token for one in extra if isinstance(one, dict) for name, token in one.items()}
    named |= {name: token for name, token in (config | older).items() if name.endswith("_token")}
    others = [token for one in extra if isinstance(one, list) for token in one]
    order = dict.fromkeys(NAMED_TOKENS) | named
    names = {name: text for name in order if (text := _content(named.get(name)))}
    special = tuple(dict.fromkeys(filter(None, map(_content, others))))
    by_id = {token: ids(added, token, pathlib.Path(where, _ADDED)) for token in added}
    all_ = {*names.values(), *special}
    new: dict[str, Mapping] = {
        text: {"special": text in all_} for text in sorted(by_id, key=by_id.__getitem__)
    }
    for token in [*(named.get(name) for name in order), *others]:
        if (text := _content(token)) and text not in by_id:
            default = {"special": isinstance(token, str) or token in named.values()}
            new[text] = default if isinstance(token, str) else default | _flags(token, path)
    return names, special, new, _listed(decoder or {}, path)


def _listed(decoder: Any, path: pathlib.Path) -> dict[str, Mapping]:
    """The tokens of {"32000": {"content": "<s>", ...}, ...} in the order of their ids."""
    if not isinstance(decoder, dict) or not all(key.isdecimal() for key in decoder):
        raise ValueError(f"{path}: added_tokens_decoder has other keys than token ids: {_REMEDY}")
    tokens = [decoder[key] for key in sorted(decoder, key=int)]
    return {_content(token): _flags(token, path) for token in tokens}


def _flags(token: Any, path: pathlib.Path) -> dict[str, bool]:
    """How a token is found in a text, as far as it says it."""
    object_ = token if isinstance(token, dict) and _content(token) else {"special": None}
    found = {name: object_[name] for name in FLAGS if name in object_}
    if not all(isinstance(value, bool) for value in found.values()):
        raise ValueError(
            f"{path}: {json_files.shown(token)} is no token: write an object with its content, and "
            f"{', '.join(FLAGS)} as true or false"
        )
    return found


def _object(files: Mapping[str, bytes], name: str, where: str | os.PathLike) -> dict[str, Any]:
    if name not in files:
        return {}
    path = pathlib.Path(where, name)
    if problem := json_files.too_many_values(files[name]):
        raise ValueError(f"{path}: {problem}: {_REMEDY}")
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error}): {_REMEDY}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON {type(value).__name__}, not an object: {_REMEDY}")
    return value


def imported_config(files: Mapping[str, bytes], where: str | os.PathLike = "") -> dict[str, Any]:
    """The config.json of the checkpoint that the tokenizer came with; {} where there was none."""
    return _object(files, IMPORTED_CONFIG, where)


def _content(token: Any) -> str:
    """The text of a token, which these files write as a string or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def ids(config: Mapping[str, Any], key: str, where: str | os.PathLike = "") -> tuple[int, ...]:
    """One or several token ids of a config; none where it has no such key."""
    value = config.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if bad := [one for one in found if not json_files.is_whole(one, 0, 1 << 32)]:
        raise ValueError(
            f"{where}: {key} holds {json_files.shown(bad[0])}, which is no token id: write whole "
            "numbers from 0"
        )
    return tuple(found)


def _template(
    files: Mapping[str, bytes], config: Mapping, old: Mapping, where: str | os.PathLike
) -> str:
    if TEMPLATE in files:
        try:
            return files[TEMPLATE].decode("utf-8")
        except UnicodeDecodeError as error:
            path = pathlib.Path(where, TEMPLATE)
            raise ValueError(f"{path} is not valid UTF-8 ({error}): {_REMEDY}") from error
    return next(
        filter(None, map(_default, (old.get("chat_template"), config.get("chat_template")))), ""
    )


def _default(value: Any) -> str:
    """A chat template, or the one named "default" of several."""
    if isinstance(value, str):
        return value
    several: Iterator = (one for one in value or () if isinstance(one, dict))
    named = {one.get("name"): one.get("template") for one in several}
    return named.get("default") or ""
