"""Tokenizers in GGUF files: the tokens of llama.cpp and of transformers' reader are their own."""

import json
import random

import jax
import numpy as np
import pytest
import tokenizers
from support import llama_cpp
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from llmx import convert
from llmx.checkpoint import gguf_file, gguf_tokenizer, hf
from llmx.model import apply, families

BLANK = gguf_tokenizer.BLANK
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BOS, END, TURN, THINK = "<s>", "</s>", "<turn>", "<think>"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST
QWEN3_5 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = (
    "the", " cat", "Hello", " WORLD", "iPhone", "don't", "We'RE", " I'll", "'tis", "'S", "  ",
    "    ", "\n", "\n\n", " \n", "\r\n", "\t", "123", " 7", "12345678901", "3.14", "1,000", "٣٤٥",
    "²", "Ⅳ", "é", "e\u0301", "Éa", "straße", "日本語", "カタカナ", "한국어", "русский",
    "हिन्दी", "ไทย", "עברית", "🙂", "👨\u200d👩\u200d👧", "\u00a0", "\u2003", "\u3000", "\u200b",
    "\u2028", "…", "—", "“q”", "!!", "?!", "(a)", "<d>", "a_b", "//", "x=1;",
    "def f(x):\n    return x", "http://a.b/c?d=e", "$5", "€", "`x`", "\\n", "ǅ", "ʰ", "==", " =",
    "-1", "𝔘", "𠀀", "\x85",
)  # fmt: skip


def texts(extra=(), number=200):
    """Varied, with special tokens and blanks at both ends."""
    draw = random.Random(0)
    found = ["", " ", "a", " a", "a ", " the cat sat", *PIECES]
    pieces = [*PIECES, *extra * 6]
    while len(found) < number:
        found.append("".join(draw.choice(pieces) for _ in range(draw.randint(2, 9))))
    return found


TEXTS = texts((BOS, END, TURN, THINK))


def with_special(tokenizer):
    """With two that end a text, one that begins it, and one that is not special."""
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, END, TURN)])
    tokenizer.add_tokens([AddedToken(THINK, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def changed(tokenizer, change):
    """After a change of its JSON."""
    content = json.loads(tokenizer.to_str())
    change(content)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def cut_by(*expressions, whole=False, **options):
    """Merged bytes of the pieces that expressions cut; no expression = GPT-2's."""
    tokenizer = tokenizers.Tokenizer(BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not expressions)
    cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, *options.get("cuts", ()), level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts() * 2, trainer)
    return changed(
        with_special(tokenizer), lambda content: content["model"].update(ignore_merges=whole)
    )


def of_characters(*, prepend):
    """Merged characters, as of SentencePiece: blanks are U+2581, and bytes what has no token."""
    tokenizer = tokenizers.Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", BLANK)
    steps = [normalizers.Prepend(BLANK), replace] if prepend else [replace]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = BpeTrainer(
        vocab_size=700, limit_alphabet=90, special_tokens=["<unk>", *BYTES], show_progress=False,
        max_token_length=12,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts() * 2, trainer)

    def drop_bytes(content):
        kept = [token for token in content["added_tokens"] if token["content"] not in BYTES]
        content["added_tokens"] = kept

    return with_special(changed(tokenizer, drop_bytes))


def of_bytes():
    """Without merges: what cuts a text does not matter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        BPE({text: number for number, text in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_special(tokenizer)


# Kind and name in the file.
MADE = {
    "gpt2": (cut_by, "gpt2", "gpt-2"),
    "digits": (lambda: cut_by(cuts=[pre_tokenizers.Digits(True)]), "gpt2", "smollm"),
    "llama3": (lambda: cut_by(LLAMA3, whole=True), "gpt2", "llama-bpe"),
    "llama3 by merges": (lambda: cut_by(LLAMA3), "gpt2", "smaug-bpe"),
    "qwen2": (lambda: cut_by(QWEN2), "gpt2", "qwen2"),
    "qwen3.5": (lambda: cut_by(QWEN3_5), "gpt2", "qwen35"),
    "deepseek": (lambda: cut_by(*DEEPSEEK), "gpt2", "deepseek-v3"),
    "bytes": (of_bytes, "gpt2", "gpt-2"),
    "characters, blank before": (lambda: of_characters(prepend=True), "llama", "default"),
    "characters": (lambda: of_characters(prepend=False), "llama", "default"),
}
# transformers' reader has the expressions of these, and always puts a blank before characters.
READ = (
    "gpt2",
    "llama3",
    "llama3 by merges",
    "qwen2",
    "qwen3.5",
    "bytes",
    "characters, blank before",
)


def write(tokenizer, file, **options):
    """A model of as many tokens, of zeros; returns the lines on what is left out."""
    model = families.preset(
        "llama3", width=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=32,
        vocab_size=tokenizer.get_vocab_size(), max_positions=128,
    )  # fmt: skip
    shapes, _ = apply.abstract_parameters(model)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    ends = [tokenizer.token_to_id(text) for text in (END, TURN)]
    names = {"bos_token": BOS, "eos_token": END}
    content = json.loads(tokenizer.to_str())
    return gguf_file.export(
        params, model, file, tokenizer=content, end_token=ends, names=names, **options
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Each tokenizer and its file."""
    pytest.importorskip("gguf", reason="what writes the files: extra `quant`")
    folder = tmp_path_factory.mktemp("files")
    made = {name: (make(), folder / f"{name}.gguf") for name, (make, *_) in MADE.items()}
    for tokenizer, file in made.values():
        assert write(tokenizer, file, template="{{ messages }}") == []
    return made


@pytest.fixture(scope="module")
def answers(files):
    pytest.importorskip("xllamacpp", reason="llama.cpp: extra `quant`")
    return llama_cpp.ask({str(file): {"texts": TEXTS} for _, file in files.values()})


def contents(file):
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("name", MADE)
def test_tokens_are_those_of_llama_cpp(name, files, answers):
    tokenizer, file = files[name]
    expected = [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)]
    assert answers[str(file)]["tokens"] == expected


@pytest.mark.parametrize("name", READ)
def test_tokens_are_those_of_transformers(name, files, transformers):
    tokenizer, file = files[name]
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Its characters have no second blank before a text that begins with one, nor one behind a
    # special token; a file cannot say which.
    special = () if MADE[name][1] == "gpt2" else (BOS, END, TURN, THINK, "\0")
    plain = [text for text in TEXTS if not any(map(text.count, special)) and text[:1] != " "]
    asked = TEXTS if not special else plain
    assert len(asked) > 60
    assert theirs(asked)["input_ids"] == [one.ids for one in tokenizer.encode_batch(asked)]
    assert (theirs.bos_token, theirs.eos_token) == (BOS, END)


@pytest.mark.parametrize("name", MADE)
def test_what_the_file_says(name, files):
    tokenizer, file = files[name]
    found, (_, kind, pre) = contents(file), MADE[name]
    id_of = tokenizer.token_to_id
    expected = {
        "tokenizer.ggml.model": kind, "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": id_of(BOS), "tokenizer.ggml.eos_token_id": id_of(END),
        "tokenizer.ggml.eot_token_id": id_of(TURN), "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False, "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    kinds = dict(
        zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"], strict=True)
    )
    wanted = {BOS: 3, END: 3, TURN: 3, THINK: 4, "a": 1}
    if kind == "llama":
        wanted |= {"<unk>": 2, "<0x41>": 6}
        assert found["tokenizer.ggml.add_space_prefix"] == ("before" in name)
    assert {text: kinds[text] for text in wanted} == wanted


def small(byte_level=True, **model):
    """A tokenizer's JSON, of few merges."""
    alphabet = (
        sorted(pre_tokenizers.ByteLevel.alphabet()) if byte_level else ["a", "b", "c", *BYTES]
    )
    texts = [*alphabet, "ab", "bc", "abc"]
    merges = [("a", "b"), ("b", "c"), ("ab", "c")]
    content = {
        "model": {
            "type": "BPE", "vocab": {text: number for number, text in enumerate(texts)},
            "merges": merges, "byte_fallback": not byte_level, **model,
        },
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "added_tokens": [],
    }  # fmt: skip
    if byte_level:
        step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        content["pre_tokenizer"] = step
    else:
        content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    return content


def added(**flags):
    return {"id": 300, "content": "<x>", "special": False, "normalized": False, **flags}


def split(regex, behavior="Isolated"):
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [step, level]}


PREFIXED = {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}
WHOLE = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
METASPACE = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "first", "split": False}
PREPEND = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": BLANK},
        {"type": "Replace", "pattern": {"String": " "}, "content": BLANK},
    ],
}
# By words of the line: a tokenizer that llama.cpp has none for.
LEFT_OUT = {
    "not a BPE": {"model": {"type": "Unigram", "vocab": []}},
    "dropout=0.1": small(dropout=0.1),
    "end_of_word_suffix": small(end_of_word_suffix="</w>"),
    "no token for 1 of the 256 bytes": small(vocab={
        text: n for n, text in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet())[1:], "ab"])
    }, merges=[("a", "b")]),
    "lowercase": small() | {"normalizer": {"type": "Lowercase"}},
    "has lstrip": small() | {"added_tokens": [added(lstrip=True)]},
    "has single_word": small() | {"added_tokens": [added(single_word=True)]},
    "'<a>' and '>bc>' can overlap": small() | {
        "added_tokens": [added(content="<a>"), added(content=">bc>", id=301)]
    },
    "is beyond the model's 400": small() | {"added_tokens": [added(id=400)]},
    "puts a blank before": small() | {"pre_tokenizer": PREFIXED},
    "no name for its pre-tokenizer, []": small() | {"pre_tokenizer": WHOLE},
    "no name for its pre-tokenizer, ['x']": small() | {"pre_tokenizer": split("x")},
    "no pre-tokenizer {'type': 'Split'": small() | {"pre_tokenizer": split("x", "Removed")},
    "ignore_merges=True is not": small(merges=[("a", "b"), ("b", "c")], ignore_merges=True),
    "no token <0x00>": small(False, vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]),
    "byte_fallback=False": small(False, byte_fallback=False),
    "has ignore_merges=True": small(False, ignore_merges=True),
    "no normalizer None": small(False) | {"normalizer": None, "pre_tokenizer": METASPACE},
    "in normalized text": small(False) | {
        "normalizer": PREPEND, "added_tokens": [added(normalized=True)]
    },
    # Merged as "a", "bc": SentencePiece would go on to "abc", which no merge makes of these.
    "SentencePiece would join": small(False, merges=[("b", "c"), ("a", "b"), ("ab", "c")]),
    # And would make a token that no merge makes.
    "make ['ab', 'c'] of": small(False, merges=[("a", "b"), ("b", "c")]),
    "has the character 0": small() | {"added_tokens": [added(content="x\0")]},
    "two of its ids have one text": small() | {"added_tokens": [added(content="ab")]},
}  # fmt: skip


@pytest.mark.parametrize("words", LEFT_OUT)
def test_what_llama_cpp_does_otherwise_is_left_out_with_a_line(words):
    found, [line] = gguf_tokenizer.metadata(LEFT_OUT[words], 400)
    assert found == {"tokenizer.ggml.model": "none"}
    assert "left out" in line and words in line.replace('"', "'").replace("Lowercase", "lowercase")


def test_both_forms_of_a_rule_are_written():
    assert gguf_tokenizer.metadata(small(), 400)[1] == []
    # Blanks that no token has inside may be cut.
    for content in (small(False), small(False) | {"normalizer": PREPEND}, small(False) | {
        "normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "never", "split": True}
    }):  # fmt: skip
        found, lines = gguf_tokenizer.metadata(content, 400)
        assert (found["tokenizer.ggml.model"], lines) == ("llama", [])
    # Whole pieces are tokens, and merges make each of them.
    found, lines = gguf_tokenizer.metadata(small(ignore_merges=True), 400)
    assert (found["tokenizer.ggml.pre"], lines) == ("gpt-2", [])


def test_lines_on_what_is_written_and_not_the_same():
    _, [line] = gguf_tokenizer.metadata(small() | {"normalizer": {"type": "NFC"}}, 400)
    assert "NFC" in line and "left out" in line
    found, [line] = gguf_tokenizer.metadata(
        small(ignore_merges=True) | {"pre_tokenizer": split(TEKKEN)}, 400
    )
    assert found["tokenizer.ggml.pre"] == "tekken" and "accents" in line
    found, [line] = gguf_tokenizer.metadata(small(), 400, end_tokens=[7, 8, 9, 10])
    assert "[10]" in line
    assert [found[f"tokenizer.ggml.{key}_token_id"] for key in ("eos", "eot", "eom")] == [7, 8, 9]


def test_without_a_bos_there_is_none():
    found, _ = gguf_tokenizer.metadata(small(), 400, end_tokens=[5])
    assert "tokenizer.ggml.bos_token_id" not in found
    assert found["tokenizer.ggml.add_bos_token"] is False
    unused = found["tokenizer.ggml.tokens"][-1], found["tokenizer.ggml.token_type"][-1]
    assert unused == ("[unused399]", 5)


def test_what_closes_a_text_is_the_first_end():
    tokenizer = cut_by()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {TURN}", special_tokens=[(TURN, tokenizer.token_to_id(TURN))]
    )
    content = json.loads(tokenizer.to_str())
    end, turn = (tokenizer.token_to_id(text) for text in (END, TURN))
    found, _ = gguf_tokenizer.metadata(content, tokenizer.get_vocab_size(), end_tokens=[end, turn])
    keys = ("eos_token_id", "eot_token_id", "add_eos_token", "add_bos_token")
    assert [found[f"tokenizer.ggml.{key}"] for key in keys] == [turn, end, True, False]


def test_a_run_says_what_its_tokenizer_and_the_files_beside_it_say(tmp_path, capsys):
    pytest.importorskip("gguf", reason="what writes the files: extra `quant`")
    tokenizer = cut_by(LLAMA3)
    tokenizer.normalizer = normalizers.NFC()
    end, turn = (tokenizer.token_to_id(text) for text in (END, TURN))
    model = families.preset("llama3", vocab_size=tokenizer.get_vocab_size() + 3)
    shapes, _ = apply.abstract_parameters(model)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "bos_token": BOS, "eos_token": END, "pad_token": THINK, "chat_template": "{{ 1 }}"
        },
        "generation_config.json": {"eos_token_id": [end, turn]},
    }  # fmt: skip
    hf.export(
        params, model, tmp_path / "hf", tokenizer_file=tmp_path / "tokenizer.json",
        files={name: json.dumps(value).encode() for name, value in files.items()},
    )  # fmt: skip
    work, file = f"--workdir={tmp_path / 'run'}", tmp_path / "model.gguf"
    assert convert.main([work, f"--from-hf={tmp_path / 'hf'}"]) == 0
    assert convert.main([work, f"--to-gguf={file}", "--dtype=float16"]) == 0
    assert f"warning: {file}: the tokenizer's normalizer, Unicode's NFC" in capsys.readouterr().out
    found = contents(file)
    keys = ("bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id", "pre")
    pad = tokenizer.token_to_id(THINK)
    expected = [tokenizer.token_to_id(BOS), end, turn, pad, "smaug-bpe"]
    assert [found[f"tokenizer.ggml.{key}"] for key in keys] == expected
    assert found["tokenizer.chat_template"] == "{{ 1 }}"
    kinds = found["tokenizer.ggml.token_type"]
    # Made special by its name, and tokens that the model has and the tokenizer has not.
    assert (kinds[pad], kinds[-3:]) == (3, [5, 5, 5])
