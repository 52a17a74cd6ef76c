"""Small tokenizers of three kinds, trained here, as published models have them, and mixed texts."""

import functools
import json
import pathlib

import numpy as np
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip


def corpus() -> list[str]:
    words = "the model reads a text and writes tokens <s> [INST] user assistant def return\n"
    return [words * 8, pathlib.Path(__file__).read_text(), "été größer 日本語 🙂 1234 5678\n" * 20]


def byte_level() -> library.Tokenizer:
    """As Llama 3: byte-level BPE, whose post-processor begins texts with a token."""
    made = library.Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(library.Regex(LLAMA3_SPLIT), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False),
    )
    made.add_special_tokens(list(LLAMA3_SPECIAL))
    begin = LLAMA3_SPECIAL[0]
    made.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B:1",
            special_tokens=[(begin, made.token_to_id(begin))],
        ),
    ])  # fmt: skip
    return made


def sentencepiece(kind: str = "BPE") -> library.Tokenizer:
    """As Llama 2 and Gemma: pieces with a mark for spaces, bytes for what is unknown, <s> first."""
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    options = dict(vocab_size=700, special_tokens=special + bytes_, show_progress=False)
    if kind == "BPE":
        made, trainer = library.Tokenizer(models.BPE()), trainers.BpeTrainer(**options)
    else:
        made = library.Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(**options, unk_token="<unk>")
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.train_from_iterator([piece for text in corpus() for piece in text.split("\n")], trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]  # bytes are ordinary tokens
    content["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    if kind != "BPE":
        del content["model"]["fuse_unk"], content["model"]["unk_token"]
    made = library.Tokenizer.from_str(json.dumps(content))
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0),
    ])  # fmt: skip
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)]
    )
    return made


def wordpiece() -> library.Tokenizer:
    """As BERT: words and their ends, [CLS] before a text and [SEP] behind it."""
    made = library.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    made.train_from_iterator(corpus(), trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


KINDS = {
    "byte_level": (byte_level, dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")),
    "sentencepiece": (sentencepiece, dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")),
    "wordpiece": (
        wordpiece,
        dict(unk_token="[UNK]", sep_token="[SEP]", cls_token="[CLS]", pad_token="[PAD]"),
    ),
}
LOOKALIKES = (
    *LLAMA3_SPECIAL, "<s>", "</s>", "[INST]", "[/INST]", "<unk>", "[CLS]", "[SEP]", "[UNK]",
    "<|eot_id", "|>", "<0x0A>", "<|endoftext|>",
)  # fmt: skip
_PIECES = (
    *LOOKALIKES, " ", "  ", "\n", "\n\n", "\t", "\r\n", "    ", " a", "the model", "The", "été",
    "größer", "日本語", "🙂", "👩‍👩‍👧", "e\u0301", "\u200b", "\u00a0", "١٢", "1234567", "3.14",
    "def f(x):", "return x + 1", "{'a': [1]}", "it's", "user", "İ", "ﬁ", "\U000f0000",
    "'", "\\", "#", "▁",
)  # fmt: skip


def mixed_texts(count: int, *, seed: int = 0) -> list[str]:
    """Texts of unicode, code, white space and what reads like special tokens."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(_PIECES, size=rng.integers(1, 12))) for _ in range(count)]


@functools.lru_cache(maxsize=8)
def _text(kind: str) -> str:
    return (sentencepiece("Unigram") if kind == "unigram" else KINDS[kind][0]()).to_str()


def write(folder: pathlib.Path, kind: str, **files: str) -> pathlib.Path:
    """A folder as a model has it: tokenizer.json and tokenizer_config.json, and `files`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_text(kind), encoding="utf-8")
    names = KINDS["sentencepiece" if kind == "unigram" else kind][1]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / name.replace("_json", ".json").replace("_jinja", ".jinja")).write_text(content)
    return folder
