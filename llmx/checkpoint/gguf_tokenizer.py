"""A tokenizer as GGUF's metadata, as far as llama.cpp's own tokenizers do the same.

It has two that a BPE can be:

- "gpt2": regular expressions that it knows by a name cut the text, and bytes are merged by rank.
- "llama": blanks are U+2581, the two neighbours whose token has the best score are merged, over the
  whole text, and what is left without a token becomes bytes.

What a tokenizer says beside that is compared here, and a difference is a reason to leave it out.
Source: src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmx.data import tokenizers
from llmx.data.json_files import shown

PREFIX = "tokenizer.ggml."
BLANK = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # each ends a generated text
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_LINES}"
_QWEN3_5 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}" for a, b in ("*+", "+*")]
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join([*_WORDS, r"\p{N}", _SLASHES])
_GPT4O = "|".join([*(f"{word}{_CONTRACTIONS}?" for word in _WORDS), r"\p{N}{1,3}", _SLASHES])
_DIGIT = r"\p{N}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the expressions, one after the other: llama.cpp's name, and whether a piece that is a token is
# taken as it is, whatever merges make of it.
_PRE = {
    (_GPT2,): [("gpt-2", False)],
    (_DIGIT, _GPT2): [("smollm", False)],
    (_LLAMA3,): [("llama-bpe", True), ("smaug-bpe", False)],
    (_LLAMA3.replace("{1,3}", ""),): [("qwen2", False)],
    (_QWEN3_5,): [("qwen35", False)],
    (_TEKKEN,): [("tekken", True)],
    (_GPT4O,): [("gpt-4o", False)],
    (r"\p{N}{1,3}", _CJK, _DEEPSEEK): [("deepseek-v3", False)],
}  # fmt: skip
_ASCII = ("tekken", "gpt-4o")  # of which llama.cpp's expressions know upper case in ASCII alone


class Different(ValueError):
    """What a tokenizer says, and llama.cpp's cannot do."""


def metadata(
    content: Mapping[str, Any], vocab_size: int, *, names: Mapping[str, str] | None = None,
    end_tokens: Sequence[int] = (), template: str = "",
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """Keys and values for a file, and lines on what these do not say.

    Args:
      content: of a tokenizer.json.
      vocab_size: tokens of the model.
      names: {"bos_token": "<s>", ...}.
      end_tokens: each ends a generated text; the first is the tokenizer's own.
      template: the chat template.
    """
    names, lines = names or {}, []
    try:
        found = _vocabulary(content, vocab_size)
        found |= _surroundings(content, names, end_tokens)
    except Different as error:
        # A model that llama.cpp has no text for.
        found = {"model": "none"}
        lines.append(
            f"the tokenizer is left out: {error}; llama.cpp then takes token ids alone: use "
            "--to-hf and llama.cpp's own converter"
        )
    ends = _ends_first(found.pop("closing", None), end_tokens)
    found |= dict(zip(_ENDS, ends, strict=False))
    if further := ends[len(_ENDS) :]:
        lines.append(f"tokens {further} end a text too, and GGUF names {len(_ENDS)}: left out")
    if found["model"] == "none":
        return {PREFIX + key: value for key, value in found.items()}, lines
    if _normalizer(content) == "NFC":
        lines.append(
            "the tokenizer's normalizer, Unicode's NFC, is left out: llama.cpp takes texts as they "
            "are"
        )
    if found.get("pre") in _ASCII:
        lines.append(
            f"llama.cpp cuts words with accents or marks otherwise than the tokenizer, under the "
            f"name {found['pre']!r} of its pre-tokenizer"
        )
    found = {PREFIX + key: value for key, value in found.items()}
    return found | ({"tokenizer.chat_template": template} if template else {}), lines


def _vocabulary(content: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Tokens with their kinds, and how text becomes these. Raises Different."""
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise Different(f"it is a {shown(model.get('type'))}, not a BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise Different(f"its BPE has {key}={shown(model[key])}")
    for token in _added(content):
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise Different(f"its token {shown(token['content'])} has {flag}")
    _require_apart([token["content"] for token in _added(content)])
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model.get("merges") or []]
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    byte_level = any(step["type"] == "ByteLevel" for step in _steps(content.get("pre_tokenizer")))
    found = _byte_level(content, ranks) if byte_level else _sentencepiece(content, ranks)
    texts, kinds = _tokens(content, vocab_size, byte_level=byte_level)
    found |= {"tokens": texts, "token_type": kinds}
    if byte_level:
        found["merges"] = [" ".join(pair) for pair in merges]
    else:
        scores = _scores(ranks, texts)
        found["scores"] = [scores.get(text, -float(len(ranks))) for text in texts]
    return found


def _require_apart(texts: Sequence[str]) -> None:
    """Raises Different where two tokens overlap in a text, of which the tokenizer takes the first
    and llama.cpp the longest. Of runs of one character both take the longest."""
    begins: dict[str, str] = {}
    for text in sorted(texts, key=len):  # the longest of those that begin so
        begins |= dict.fromkeys((text[:n] for n in range(1, len(text))), text)
    for text in texts:
        for n in range(1, len(text)):
            other = begins.get(text[n:], "")
            if len(other) >= len(text) and other != text and len(set(text + other)) > 1:
                raise Different(f"its tokens {shown(text)} and {shown(other)} can overlap")


def _tokens(
    content: Mapping[str, Any], vocab_size: int, *, byte_level: bool
) -> tuple[list[str], list[int]]:
    """Text and kind of each id of the model."""
    model = content["model"]
    by_id = {number: (text, NORMAL) for text, number in model["vocab"].items()}
    if not byte_level:
        by_id |= {model["vocab"][text]: (text, BYTE) for text in _BYTES}
    for token in _added(content):
        kind = CONTROL if token["special"] else USER_DEFINED
        by_id[token["id"]] = token["content"], kind
    if not byte_level and (unknown := model.get("unk_token")) in model["vocab"]:
        by_id[model["vocab"][unknown]] = unknown, UNKNOWN
    if beyond := [text for number, (text, _) in by_id.items() if number >= vocab_size]:
        raise Different(f"its token {shown(beyond[0])} is beyond the model's {vocab_size} tokens")
    unused = (f"[unused{number}]" for number in range(vocab_size))
    tokens = [by_id.get(number, (name, UNUSED)) for number, name in enumerate(unused)]
    if cut := [text for text, _ in tokens if "\0" in text]:
        raise Different(f"its token {shown(cut[0])} has the character 0, which ends texts there")
    if len({text for text, _ in tokens}) < vocab_size:
        raise Different("two of its ids have one text")
    return [text for text, _ in tokens], [kind for _, kind in tokens]


# ------------------------------------------------------------------------------------- byte level


def _byte_level(content: Mapping[str, Any], ranks: Mapping[tuple, int]) -> dict[str, Any]:
    """Of merged bytes: the name of the expressions. Raises Different."""
    if _normalizer(content) not in ("", "NFC"):
        raise Different(f"it normalizes text by {shown(content['normalizer'])}")
    vocab = content["model"]["vocab"]
    from tokenizers import pre_tokenizers

    if missing := set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys():
        raise Different(f"it has no token for {len(missing)} of the 256 bytes")
    expressions = _expressions(content["pre_tokenizer"])
    whole = bool(content["model"].get("ignore_merges"))
    if not ranks and not whole:  # pieces do not matter
        expressions = (_GPT2,)
    named = _PRE.get(expressions)
    if named is None:
        raise Different(f"llama.cpp has no name for its pre-tokenizer, {shown(list(expressions))}")
    exact = [name for name, takes_whole in named if takes_whole == whole]
    if exact:
        return {"model": "gpt2", "pre": exact[0]}
    special = {token["content"] for token in _added(content)}
    for text in vocab.keys() - special:
        if _merged(text, ranks)[0] != [text]:
            raise Different(
                f"ignore_merges={whole} is not llama.cpp's with this pre-tokenizer, and merges do "
                f"not make {shown(text)}"
            )
    return {"model": "gpt2", "pre": named[0][0]}


def _expressions(pre_tokenizer: Mapping[str, Any]) -> tuple[str, ...]:
    """The regular expressions that cut a text, each the pieces of the one before."""
    found, steps = [], list(_steps(pre_tokenizer))
    for number, step in enumerate(steps):
        pattern = step.get("pattern") or {}
        isolated = step.get("behavior") == "Isolated" and not step.get("invert")
        if step["type"] == "Split" and "Regex" in pattern and isolated:
            found.append(pattern["Regex"])
        elif step["type"] == "Digits":
            found.append(_DIGIT if step["individual_digits"] else rf"{_DIGIT}+")
        elif step["type"] != "ByteLevel" or number < len(steps) - 1:
            raise Different(f"llama.cpp has no pre-tokenizer {shown(step)}")
        elif step["add_prefix_space"]:
            raise Different("it puts a blank before a text (add_prefix_space)")
        elif step.get("use_regex", True):
            found.append(_GPT2)
    return tuple(found)


# ---------------------------------------------------------------------------------- SentencePiece

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _sentencepiece(content: Mapping[str, Any], ranks: Mapping[tuple, int]) -> dict[str, Any]:
    """Of merged characters: whether a blank is put before a text. Raises Different."""
    model = content["model"]
    if missing := [text for text in _BYTES if text not in model["vocab"]]:
        raise Different(f"its BPE is not of bytes, and has no token {missing[0]} for one")
    if not model.get("byte_fallback"):
        raise Different("its BPE has byte_fallback=False")
    if model.get("ignore_merges"):
        raise Different("its BPE has ignore_merges=True")
    before = list(_steps(content.get("normalizer")))
    prepends = bool(before) and before[0] == {"type": "Prepend", "prepend": BLANK}
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    cuts = list(_steps(content.get("pre_tokenizer")))
    metaspace = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "never"}
    inside = any(BLANK in text[1:] for pair in ranks for text in ["".join(pair)])
    if before == [replaces] and all(_cuts_blanks_alone(step) for step in cuts):
        cuts = []  # blanks are no more
    if not before and len(cuts) == 1 and cuts[0] in [
        metaspace | {"split": False}, *[metaspace | {"split": True}] * (not inside)
    ]:  # fmt: skip
        before, cuts = [replaces], []
    if before[prepends:] != [replaces] or cuts:
        raise Different(
            f"llama.cpp has no normalizer {shown(content.get('normalizer'))} with pre-tokenizer "
            f"{shown(content.get('pre_tokenizer'))}"
        )
    for token in _added(content):
        if prepends and token.get("normalized"):
            raise Different(f"its token {shown(token['content'])} is looked for in normalized text")
    return {"model": "llama", "pre": "default", "add_space_prefix": prepends}


def _cuts_blanks_alone(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Split" and step.get("pattern") == {"String": " "}


def _scores(ranks: Mapping[tuple, int], texts: Sequence[str]) -> dict[str, float]:
    """Scores by which the same neighbours are merged as by rank. Raises Different.

    The best neighbours make a token whether or not they are in the list of merges. Inside a token's
    text the same merges follow as in that text alone, whose last one thus makes this token, if any
    does. So the rank of that one is the token's; and the list is not missed, unless merges of a
    token's text end with two others.
    """
    made, found = {"".join(pair) for pair in ranks}, {}
    for text in texts:
        parts, last = _merged(text, ranks)
        if text in made and len(parts) == 1:
            found[text] = -float(last)
        elif text in made or len(parts) == 2:
            raise Different(
                f"its merges make {shown(parts)} of {shown(text)}, which SentencePiece would join"
            )
    return found


def _merged(text: str, ranks: Mapping[tuple, int]) -> tuple[list[str], int]:
    """What merges make of a text, and the rank of the last one."""
    parts, last = list(text), -1
    while True:
        pairs = enumerate(itertools.pairwise(parts))
        found = [(ranks[pair], at) for at, pair in pairs if pair in ranks]
        if not found:
            return parts, last
        last, at = min(found)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


# ----------------------------------------------------------------------------------- around a text


def _surroundings(
    content: Mapping[str, Any], names: Mapping[str, str], end_tokens: Sequence[int]
) -> dict[str, Any]:
    """What is put around a text, and the ids of named tokens. Raises Different."""
    start, closing = (), ()
    if content.get("post_processor"):
        import tokenizers as library

        start, closing = tokenizers.surroundings(library.Tokenizer.from_str(json.dumps(content)))
    if len(start) > 1 or len(closing) > 1:
        raise Different(f"it puts tokens {[*start, *closing]} around a text, and GGUF has one each")
    ids = content["model"]["vocab"] | {one["content"]: one["id"] for one in _added(content)}
    found = {
        "bos_token_id": start[0] if start else ids.get(names.get("bos_token")),
        "unknown_token_id": ids.get(names.get("unk_token")),
        "padding_token_id": ids.get(names.get("pad_token")),
    }  # fmt: skip
    found = {key: number for key, number in found.items() if number is not None}
    end = {"closing": closing[0]} if closing else {}
    return found | {"add_bos_token": bool(start), "add_eos_token": bool(closing)} | end


def _added(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens that are looked for in a text before all else."""
    return content.get("added_tokens") or []


def _ends_first(closing: int | None, end_tokens: Sequence[int]) -> list[int]:
    """All that end a text, first the one that the tokenizer puts there."""
    return list(dict.fromkeys(([] if closing is None else [closing]) + list(end_tokens)))


def _normalizer(content: Mapping[str, Any]) -> str:
    """The kind of the normalizer; "" = none."""
    return "+".join(step["type"] for step in _steps(content.get("normalizer")))


def _steps(part: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps, one after the other."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield dict(part)
        return
    for key in ("normalizers", "pretokenizers"):
        for step in part.get(key) or []:
            yield from _steps(step)
