"""Token ids against transformers, special tokens in and out of text, and what shards keep."""

import json

import numpy as np
import pytest
from support import small_tokenizers

from llmx.data import __main__ as command
from llmx.data import build, config, dataset, shards, tokenizers

TEXTS = small_tokenizers.mixed_texts(1000)
KINDS = (*small_tokenizers.KINDS, "unigram")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: small_tokenizers.write(root / kind, kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(kind, folders):
    """With special tokens, without them, and with special tokens as characters."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folders[kind])
    ours = tokenizers.load(folders[kind])
    raw = [text.encode() for text in TEXTS]
    documents = [ids.tolist() for ids in ours.encode_documents(raw)]
    wanted = theirs(TEXTS, add_special_tokens=False)["input_ids"]
    whole = theirs(TEXTS)["input_ids"]
    characters = theirs(TEXTS, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    num_special = 0
    for row, text in enumerate(TEXTS):
        special = ours.find_special(text)
        num_special += len(special)
        ids = ours.encode_marked(text, special).ids.tolist()
        assert ids == wanted[row], text
        assert [*ours.start, *ids, *ours.closing] == whole[row], text
        # A Unigram model of theirs makes "</s>" of its characters.
        if kind != "unigram":
            assert documents[row] == characters[row], text
    assert num_special > 300
    assert {"byte_level": 1, "wordpiece": 1}.get(kind, 1) == len(ours.start)
    assert len(ours.closing) == (kind == "wordpiece")


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_makes_a_special_token(kind, folders):
    ours = tokenizers.load(folders[kind])
    unknown = {ours.special.get(name) for name in ("<unk>", "[UNK]")}
    special = set(ours.special.values()) - unknown
    assert len(special) >= 4
    for text in [*TEXTS, *small_tokenizers.LOOKALIKES, *(f" {t} " for t in ours.special)]:
        assert not special & set(ours.encode(text).tolist()), text


@pytest.mark.parametrize("kind", KINDS)
def test_marked_tokens_alone_are_special(kind, folders):
    """A token that is both meant and written in a text; ranges are those of the text."""
    ours = tokenizers.load(folders[kind])
    token = list(ours.special)[-2]
    text = f"the {token} model{token}\nreads {token}"
    first, second, third = ours.find_special(text)
    for marked in ([], [second], [first, third], [first, second, third]):
        found = ours.encode_marked(text, marked)
        at = np.flatnonzero(found.ids == ours.special[token])
        assert [(found.starts[i], found.ends[i]) for i in at] == marked
        assert (np.diff(found.starts) >= 0).all() and found.ends[-1] == len(text)
        assert (found.ends > found.starts).mean() > 0.8


def flagged(content, **flags):
    return {"__type": "AddedToken", "content": content, **flags}


EOT, END = "<|eot_id|>", "<|end_of_text|>"
SPECIAL = {"special": True, "normalized": False}
# Flags in tokenizer.json, tokenizer_config.json, and the files beside it.
NAMED = {
    "bare names": ({EOT: {"rstrip": True}, END: {"lstrip": True}}, {"eos_token": EOT}, {}),
    "an object": ({EOT: {"rstrip": True}}, {"eos_token": flagged(EOT, lstrip=True)}, {}),
    "a new object": ({}, {"eos_token": flagged("<new>", lstrip=True, rstrip=True)}, {}),
    "single words": (
        {EOT: {"single_word": True}, END: {"single_word": True}}, {"eos_token": EOT}, {},
    ),
    "more": (
        {EOT: {"lstrip": True}},
        {"additional_special_tokens": [EOT, flagged("<q>", rstrip=True, normalized=False)]}, {},
    ),
    "new names": ({}, {"eos_token": "<new>", "image_token": "<q>"}, {}),
    "a list of all": (
        {EOT: {"lstrip": True}},
        {"eos_token": EOT, "pad_token": "<new>", "added_tokens_decoder": {
            "900": {"content": "<q>", "rstrip": True, **SPECIAL},
            "504": {"content": EOT, "rstrip": True, **SPECIAL},
            "507": {"content": "<start_of_turn>", "lstrip": True, "special": False},
        }},
        {"special_tokens_map": {"cls_token": "<cls>"}, "added_tokens": {"<other>": 901}},
    ),
    "older files": (
        {EOT: {"rstrip": True}}, {"eos_token": END},
        {"special_tokens_map": {
            "eos_token": {"content": EOT, "lstrip": True},
            "pad_token": {"content": "<new>", "lstrip": True, "normalized": False},
            "additional_special_tokens": ["<q>"],
        }, "added_tokens": {"<q>": 901, "<z>": 900}},
    ),
    "normalized": (
        {EOT: {"normalized": True}, "<end_of_turn>": {"special": False, "normalized": True}},
        {"eos_token": EOT, "pad_token": "<end_of_turn>"}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named_tokens_are_found_as_transformers_finds_them(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    flags, named, beside = NAMED[name]
    folder = small_tokenizers.write(tmp_path, "byte_level")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [
        token | flags.get(token["content"], {}) for token in content["added_tokens"]
    ]
    content["normalizer"] = {"type": "Lowercase"} if name == "normalized" else None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"} | named, **beside}
    for file, written in files.items():
        (folder / f"{file}.json").write_text(json.dumps(written))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), tokenizers.load(folder)
    tokens = [*theirs.added_tokens_encoder, "<start_of_turn>", "<q>", "<new>"]
    texts = [text.replace("</s>", "<q>").replace("<s>", "<new>") for text in TEXTS[:200]]
    texts += [
        text for token in tokens
        for text in (f"a {token} \n b", f"a{token}b", f"a{token} b{token.upper()}\n\n{token}")
    ]  # fmt: skip
    for text, want in zip(texts, theirs(texts)["input_ids"], strict=True):
        # A text that begins with the token that begins texts needs no other.
        assert ours.encode_prompt(text).tolist() == want[want[:1] == want[1:2] :], text
    assert theirs.special_tokens_map.items() <= dict(ours.names).items()
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("special", [True, False])
def test_a_list_of_tokens_says_which_are_special(special, tmp_path):
    """Whatever tokenizer.json says; those that are not are found in documents."""
    transformers = pytest.importorskip("transformers")
    folder = small_tokenizers.write(tmp_path, "byte_level")
    content = json.loads((folder / "tokenizer.json").read_text())
    [token] = [one for one in content["added_tokens"] if one["content"] == EOT]
    token |= {"special": special}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    alone = tokenizers.load(folder)
    listed = {str(token["id"]): {"content": EOT, "special": not special, "normalized": False}}
    named["added_tokens_decoder"] = listed
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), tokenizers.load(folder)
    assert (EOT in ours.special) is not special and (EOT in alone.special) is special
    texts = ["a", f"a {EOT} b", f"{EOT}{EOT}x"]
    want = theirs(texts, add_special_tokens=False)["input_ids"]
    assert [ours._encode_read(text).tolist() for text in texts] == want
    # In a document, it is characters where it is special.
    assert (token["id"] in ours.encode(texts[1])) is special
    assert (token["id"] in alone.encode(texts[1])) is not special
    if special:
        assert [ours.encode(text).tolist() for text in texts] == want
        # The same vocabulary, and other ids of documents.
        assert ours.fingerprint == alone.fingerprint and ours.rules != alone.rules


def test_a_single_word_beside_a_letter_is_named(tmp_path):
    folder = small_tokenizers.write(tmp_path, "byte_level")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(
        text.replace('"single_word": false', '"single_word": true').replace(
            '"single_word":false', '"single_word":true'
        )
    )
    ours = tokenizers.load(folder)
    for text in (f"the model{EOT}", f"{EOT}reads"):
        with pytest.raises(ValueError, match="as a single_word, which is no token beside a letter"):
            ours.encode_marked(text, ours.find_special(text))
        assert ours.special[EOT] not in ours.encode_prompt(text)
    text = f"the model {EOT} reads."
    assert ours.special[EOT] in ours.encode_marked(text, ours.find_special(text)).ids


def test_a_message_writes_no_normalized_token(tmp_path):
    """Which transformers finds in other letters, too."""
    folder = small_tokenizers.write(tmp_path, "byte_level")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    content["added_tokens"] = [token | {"normalized": True} for token in content["added_tokens"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    ours = tokenizers.load(folder)
    text = "a <|EOT_ID|> <|eot_id|>"
    found = ours.encode_marked(text, [(13, 23)])
    assert found.ids.tolist().count(ours.special["<|eot_id|>"]) == 1
    assert ours.encode_prompt(text).tolist().count(ours.special["<|eot_id|>"]) == 2


def test_prompts_begin_once_and_stop_where_the_model_does(tmp_path):
    generation = json.dumps({"eos_token_id": [501, 503]})
    folder = small_tokenizers.write(tmp_path, "byte_level", generation_config_json=generation)
    ours = tokenizers.load(folder)
    begin, header, end, eot = (
        ours.special[f"<|{name}|>"]
        for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id")
    )
    prompt = "<|start_header_id|>user<|end_header_id|>\n\nthe"
    ids = ours.encode_prompt(prompt).tolist()
    assert ids[:2] == [begin, header] and ids.count(begin) == ids.count(end) == 1
    assert ours.encode_prompt(f"<|begin_of_text|>{prompt}").tolist() == ids
    assert len(ours.encode(prompt)) > len(ids) + 10
    assert {501, 503, eot, ours.end_of_document} == set(ours.stop_tokens)
    assert ours.special["<|end_of_text|>"] == ours.end_of_document
    assert tokenizers.ByteTokenizer().stop_tokens == (256,)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id holds 'x', which is no"),
        ("tokenizer_config.json", "[1]", r"tokenizer_config\.json: a JSON list, not an object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": {}}}',
            "keys than token ids",
        ),
        (
            "tokenizer_config.json",
            '{"eos_token": {"content": "a", "lstrip": 1}}',
            "is no token",
        ),
        ("special_tokens_map.json", "{", r"special_tokens_map\.json: not readable as JSON"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja is not valid UTF-8"),
    ],
)
def test_a_bad_file_beside_the_tokenizer_is_named(name, content, message, tmp_path):
    folder = small_tokenizers.write(tmp_path, "wordpiece")
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        tokenizers.load(folder)


# ---- documents ----


def recipe(source, tokenizer, **options):
    made = dict(tokenizer=tokenizer, text_key="text", skip_bad=False) | options
    return build.make_recipe((str(source),), **made)


def test_documents_begin_by_the_tokenizers_rule(tmp_path, folders):
    source = tmp_path / "text.jsonl"
    texts = ["the model", "reads <|eot_id|> and <|begin_of_text|>"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ours = tokenizers.load(folders["byte_level"])
    for bos in (True, False):
        folder = tmp_path / f"bos-{bos}"
        folder.mkdir()
        build.write_shards(folder, recipe(source, ours, bos=bos), report=lambda *_: None)
        opened = shards.open_shards(folder)
        assert opened.start == (ours.start if bos else ())
        (tokens,), want = opened.tokens, []
        for text in texts:
            want += [*(ours.start if bos else ()), *ours.encode(text), ours.end_of_document]
        assert tokens.tolist() == want


def test_the_identity_changes_with_the_ids_and_only_then(tmp_path, folders):
    source = tmp_path / "text.txt"
    source.write_text("words")
    identity = lambda tokenizer, **more: recipe(source, tokenizer, **more).identity()  # noqa: E731
    starting = tokenizers.load(folders["byte_level"])
    alone = tmp_path / "alone.json"
    alone.write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
    # The files beside a tokenizer.json say nothing of plain text, but for what they make special.
    assert identity(starting) == identity(tokenizers.load(alone))
    assert identity(starting) != identity(starting, bos=False)
    trained = tokenizers.train([b"one two three " * 9], vocab_size=300)
    for plain in (tokenizers.ByteTokenizer(), trained):
        assert identity(plain) == identity(plain, bos=False)
    # Exactly what earlier versions hashed, so that their shards are found again.
    one = recipe(source, starting, bos=False)
    (file,) = one.files
    before = {
        "files": [(file.path, "text", file.num_bytes, file.mtime_ns)], "content": one.content,
        "tokenizer": starting.fingerprint, "text_key": "text", "skip_bad": False,
        "shard_tokens": build.SHARD_TOKENS, "piece_bytes": 1 << 20, "train_bytes": 256 << 20,
        "version": 1,
    }  # fmt: skip
    assert one.identity() == shards.json_hash(before)
    # What a document held as one token becomes characters.
    folder = small_tokenizers.write(tmp_path / "named", "byte_level")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][-1]["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    before = identity(tokenizers.load(folder))
    named = {"eos_token": content["added_tokens"][-1]["content"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    assert identity(tokenizers.load(folder)) != before


def test_shards_keep_the_files_beside_the_tokenizer(tmp_path, folders):
    source = tmp_path / "text.txt"
    source.write_text("the model reads a text " * 9)
    files = {"chat_template_jinja": "{{ 1 }}", "generation_config_json": '{"eos_token_id": 7}'}
    folder = small_tokenizers.write(tmp_path / "model", "byte_level", **files)
    made = config.DataConfig(
        sources=(str(source),), tokenizer=str(folder), held_out=0.0, cache_dir=str(tmp_path / "c")
    )
    opened = dataset.open_dataset(made, sequence_length=4, seed=0, log=lambda _: None)
    assert opened.tokenizer.template == "{{ 1 }}" and 7 in opened.tokenizer.stop_tokens
    (written,) = (tmp_path / "c").iterdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (written / name).read_bytes() == (folder / name).read_bytes()
    (written / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"generation_config\.json is missing or not what"):
        shards.open_shards(written)
    # Shards of another beginning are no part of the same run.
    (written / "generation_config.json").write_text('{"eos_token_id": 7}')
    more = tmp_path / "more.txt"
    more.write_text("and writes tokens " * 9)
    mixed = config.DataConfig(
        sources=(f"shards:{written}", str(more)), held_out=0.0, bos=False,
        cache_dir=str(tmp_path / "c"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"begin with the tokens \[500\], those of .* with \[\]"):
        dataset.open_dataset(mixed, sequence_length=4, seed=0, log=lambda _: None)


def test_a_folder_with_a_model_is_not_cleared(tmp_path, folders):
    """Also where no file of it but those of the tokenizer has a name that is none of ours."""
    (tmp_path / "text.txt").write_text("words")
    model = small_tokenizers.write(tmp_path / "model", "wordpiece", generation_config_json="{}")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    source = ["--source", str(tmp_path / "text.txt"), "--output", str(model)]
    assert command.main(source) == 2
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    # What a build has written is its own, files beside the tokenizer included.
    output = ["--source", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    assert command.main([*output, "--tokenizer", str(folders["byte_level"])]) == 0
    assert (tmp_path / "out/tokenizer_config.json").is_file()
    assert command.main([*output, "--overwrite"]) == 0
    assert not (tmp_path / "out/tokenizer_config.json").exists()
