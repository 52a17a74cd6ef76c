"""Conversations: ids against transformers, what is learned, no way for a message to be special."""

import itertools
import json
import pathlib

import numpy as np
import pytest
from support import chat_templates, small_tokenizers

from llmx.data import __main__ as command
from llmx.data import chat, config, dataset, shards, tokenizers

STYLES = chat_templates.STYLES
WORDS = (
    "the model reads",
    "été 日本語 🙂",
    "def f(x):\n    return 1",
    " padded \n",
    "a < b",
    "[1] |>",
    "user",
)


@pytest.fixture(scope="module")
def coders(tmp_path_factory):
    """For each style a folder with the tokenizer and its template."""
    root = tmp_path_factory.mktemp("chat")
    return {
        name: small_tokenizers.write(root / name, kind, chat_template_jinja=template)
        for name, (template, kind, _) in STYLES.items()
    }


def talk(*contents, system=False):
    """A conversation that begins with a user."""
    roles = itertools.chain(["system"] * system, itertools.cycle(["user", "assistant"]))
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def conversations(system: bool):
    rng = np.random.default_rng(1)
    for turns in (2, 2, 4, 6, 3):
        yield talk(*rng.choice(WORDS, size=turns), system=False)
        if system:
            yield talk(*rng.choice(WORDS, size=turns + 1), system=True)


def encoded(coder, messages, **options):
    template = chat.template_of(coder)
    return chat.encode(coder, template.render(messages, **options))[0].tolist()


@pytest.mark.parametrize("style", STYLES)
def test_ids_are_those_of_transformers(style, coders):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(coders[style])
    ours = tokenizers.load(coders[style])
    for messages in conversations(STYLES[style][2]):
        for prompt in (False, True):
            want = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
            assert encoded(ours, messages, generation_prompt=prompt) == want, messages


def learned(coder, messages, first=0):
    """The text of each run of learned tokens, special tokens by name, and the other tokens."""
    rendered = chat.template_of(coder).render_to_learn(chat.Conversation(messages, first))
    ids, weights = chat.encode(coder, rendered)
    names = {index: token for token, index in coder.special.items()}
    runs = []
    for weight, pairs in itertools.groupby(zip(ids.tolist(), weights, strict=True), lambda p: p[1]):
        group = itertools.groupby((token for token, _ in pairs), names.get)
        text = "".join(name or coder.decode(list(part)) for name, part in group)
        runs += [text] if weight else []
    return runs


END = {
    "llama3": "<|eot_id|>", "chatml": "<|im_end|>", "chatml_marked": "<|im_end|>",
    "qwen3": "<|im_end|>", "gemma": "<end_of_turn>", "mistral": "</s>", "mistral_unigram": "</s>",
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_the_assistants_turns_alone_are_learned(style, coders):
    ours, end = tokenizers.load(coders[style]), END[style]
    contents = ["the model", "reads a text", "and", "writes tokens", "user", "text"]
    system = STYLES[style][2]
    messages = talk(*(["be kind"] if system else []), *contents, system=system)
    want = [f"{text}{end}" for text in contents[1::2]]
    thought = "<think>\n\n</think>\n\n" if style == "qwen3" else ""
    want[-1] = thought + want[-1]
    assert [run.strip() for run in learned(ours, messages)] == want
    # From a number on, as of a prompt and its completion.
    first = len(messages) - 1
    assert [run.strip() for run in learned(ours, messages, first)] == want[-1:]
    assert chat.template_of(ours).end_of_turn() == end


def test_a_turn_without_a_token_behind_it_is_learned_as_a_whole(coders):
    """A special token before what is said does not close the turn."""
    ours = tokenizers.load(coders["chatml"]).with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% endfor %}"
    )
    found = learned(ours, talk("hello", "hi there", "and", "bye"))
    assert found == ["<|im_start|>assistant: hi there", "<|im_start|>assistant: bye"]
    assert chat.template_of(ours).end_of_turn() == ""


DROPPED = (
    "{% set c = m.content %}{% if not loop.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}"
)
PLAIN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% else %}CLOSED{% endif %}"
)
MARKERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\nTURN{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|end_header_id|>{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|im_end|>"
    "{% else %}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
ALWAYS = "{% for m in messages %}<|im_start|>{{ m.role }}:TURN{% endfor %}<|im_start|>assistant:"
# A template, what is learned of two answers, the second after a thought, and the end of a turn.
TURNS = {
    "one end token behind plain text": (
        PLAIN.replace("CLOSED", "<|im_end|>"), ["one\n\n", "<t></think>two\n\n<|im_end|>"],
        "<|im_end|>",
    ),
    "plain text that begins like the next turn": (
        PLAIN.replace("CLOSED", "### end"), ["one\n\n", "<t></think>two\n\n"], "",
    ),
    "no end": (PLAIN.replace("CLOSED", ""), ["one\n\n", "<t></think>two\n\n"], ""),
    "markers only": (MARKERS.replace("TURN", "{{ m.content }}"), ["one", "<t></think>two"], ""),
    "markers only, thoughts dropped": (
        MARKERS.replace("TURN", DROPPED), ["one", "<t></think>two"], "",
    ),
    "another token behind the conversation": (
        MARKERS.replace("TURN", "{{ m.content }}<|im_end|>\n").replace(
            "{% endif %}", "{% else %}<|end_of_text|>{% endif %}"
        ),
        ["one<|im_end|>", "<t></think>two<|im_end|>"], "<|im_end|>",
    ),
    "the last turn ends otherwise": (
        CHANNELS, ["<|end_header_id|>one", "<|end_header_id|><t></think>two<|im_end|>"],
        "<|im_end|>",
    ),
    "always a generation prompt": (
        ALWAYS.replace("TURN", "{{ m.content }}<|im_end|>"),
        ["one<|im_end|>", "<t></think>two<|im_end|>"], "<|im_end|>",
    ),
    "always a generation prompt, no end": (
        ALWAYS.replace("TURN", "{{ m.content }}"), ["one", "<t></think>two"], "",
    ),
    "always a generation prompt, plain text": (
        PLAIN[: PLAIN.index("{% if")] + "### assistant:\n", ["one\n\n", "<t></think>two\n\n"], "",
    ),
    "two end tokens": (
        MARKERS.replace("TURN", "{{ m.content }}<|im_end|><|eot_id|>"),
        ["one<|im_end|><|eot_id|>", "<t></think>two<|im_end|><|eot_id|>"], "<|im_end|>",
    ),
    "marked": (
        MARKERS.replace(
            "TURN",
            "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
            "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}",
        ),
        ["one<|im_end|>", "<t></think>two<|im_end|>"], "<|im_end|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("asked", ["and", "one", "<|im_end|>one\n\n### end", "\n\n"])
def test_nothing_behind_a_turn_is_learned(name, asked, coders):
    """Whatever is behind it: a user's text, a header, a token of the whole conversation."""
    template, want, end = TURNS[name]
    ours = tokenizers.load(coders["chatml"]).with_template(template)
    dropped = "<t></think>" if "</think>" in template else ""
    said = ["hello", f"{dropped}one", asked, "<t></think>two"]
    assert learned(ours, talk(*said)) == want
    assert learned(ours, talk(*said), first=3) == want[1:]
    # A user has the last word: the earlier turn is as it was.
    assert learned(ours, talk(*said[:3])) == want[:1]
    assert chat.template_of(ours).end_of_turn() == end


# A turn is closed, and an answer asked for, where something follows.
OPEN_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if add_generation_prompt or not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<|im_start|>assistant\n"
    "{% endif %}"
)
LLAMA3 = chat_templates.LLAMA3.replace("{% if add_generation_prompt %}", "{% if true %}")
# A template, what is learned of three answers, the second right behind the first.
BEHIND = {
    "closed where something follows": (OPEN_END, ["one<|im_end|>", "two<|im_end|>", "three"]),
    "always a header": (LLAMA3, ["one<|eot_id|>", "two<|eot_id|>", "three<|eot_id|>"]),
    "always a header, no end": (
        ALWAYS.replace("TURN", "{{ m.content }}"), ["one", "two", "three"],
    ),
    "always a header, plain text": (
        PLAIN[: PLAIN.index("{% if")] + "### assistant:{{ '\\n' }}",
        ["one\n\n", "two\n\n", "three\n\n"],
    ),
    "ChatML": (
        chat_templates.CHATML, ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"],
    ),
    "no end": (MARKERS.replace("TURN", "{{ m.content }}"), ["one", "two", "three"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND)
def test_nothing_of_the_next_answer_is_learned(name, coders):
    template, want = BEHIND[name]
    ours = tokenizers.load(coders["llama3" if template is LLAMA3 else "chatml"]).with_template(
        template
    )
    messages = talk("q", "one", "", "three")
    messages[2] = {"role": "assistant", "content": "two"}
    rendered = chat.template_of(ours).render_to_learn(chat.Conversation(messages))
    assert [rendered.text[a:b] for a, b in rendered.learned] == want
    # A user in between changes nothing.
    asked = [*messages[:2], {"role": "user", "content": "and"}, *messages[2:]]
    rendered = chat.template_of(ours).render_to_learn(chat.Conversation(asked))
    assert [rendered.text[a:b] for a, b in rendered.learned] == want
    assert chat.template_of(ours).end_of_turn() == want[0][3:].strip()


CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<t></t>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{% if (loop.first and m.content) or not loop.first %} {% endif %}"
    "call {{ (c.function or c) | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("content", ["", None, "hm"])
@pytest.mark.parametrize("names", [("f",), ("f", "g")])
@pytest.mark.parametrize("nested", [True, False])
def test_a_turn_that_calls_tools_and_says_nothing(content, names, nested, coders):
    """The template asks whether there is content, and writes the last turn otherwise."""
    ours = tokenizers.load(coders["chatml"]).with_template(CALLS)
    calls = [{"function": {"name": name}} if nested else {"name": name} for name in names]
    messages = chat.checked([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"},
    ])  # fmt: skip
    said = [*filter(None, [content]), *(f'call {{"name": "{name}"}}' for name in names)]
    assert learned(ours, messages) == [" ".join(said) + "<|im_end|>", "<t></t>a<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}"
         "{% if not add_generation_prompt %}({{ messages[1].content }}){% endif %}",
         "the end of message 2 cannot be found"),
        (PLAIN.replace("CLOSED", "end").replace("{{ m.content }}", "{{ m.content + m.content }}"),
         "the end of message 2 cannot be found"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}<|eot_id|>",
         "renders what is before message 2 in another way"),
        ("{% for m in messages %}{{ m.role }}\n{{ m.content }}{% endfor %}"
         "{% if add_generation_prompt %}assistant\n<think>{% endif %}",
         "renders what is before message 2 in another way"),
    ],
)  # fmt: skip
def test_turns_that_cannot_be_told_apart_are_refused(template, message, coders):
    ours = tokenizers.load(coders["chatml"]).with_template(template)
    with pytest.raises(ValueError, match=f"(?s){message}.*a template with {{% generation %}}"):
        learned(ours, talk("hello", "one", "and", "two"))


def strip(folder, source, **flags):
    """The tokenizer of a folder with flags of its special tokens, in another folder."""
    content = json.loads((source / "tokenizer.json").read_text())
    content["added_tokens"] = [token | flags for token in content["added_tokens"]]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')
    return tokenizers.load(folder)


def test_a_header_that_takes_in_blanks_is_not_learned(coders, tmp_path):
    """Nor one that takes in those before it, and an end of turn is learned with either."""
    source, (template, *_) = coders["chatml"], TURNS["markers only"]
    plain = tokenizers.load(source).with_template(template)
    headers = template.replace("{{ m.role }}", "").replace(">assistant\n", ">")
    for flags, contents, want in (
        ({"rstrip": True}, ["a", " one ", " b", "\ntwo\n"], ["one ", "two\n"]),
        ({"lstrip": True}, ["a", " one ", " b", "\ntwo\n"], ["\n one", "\n\ntwo\n"]),
    ):
        ours = strip(tmp_path / "_".join(flags), source, **flags)
        assert learned(ours.with_template(headers), talk(*contents)) == want
        chatml = ours.with_template(chat_templates.CHATML)
        ends = [run[-10:] for run in learned(chatml, talk(*contents))]
        assert ends == ["<|im_end|>"] * 2
    # Two line breaks are one token, of which the header has the first.
    assert learned(plain, talk("a", " one ", " b", "\ntwo\n")) == [" one ", "two\n"]


def test_a_token_over_the_beginning_or_the_end_of_a_turn(coders):
    """It is learned for what it holds of the answer, and never for what is behind it."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant: {% else %}<|eot_id|>{% endif %}"
    )
    ours = tokenizers.load(coders["chatml"]).with_template(template)
    rendered = chat.template_of(ours).render_to_learn(
        chat.Conversation(talk("a", "model", "b", ""))
    )
    assert [rendered.text[a:b] for a, b in rendered.learned] == ["model ", " <|eot_id|>"]
    assert learned(ours, talk("a", "model", "b", "")) == [" model", "<|eot_id|>"]
    # All of the turn in one token with what is around it.
    inner = ours._tokenizer.from_str(ours._tokenizer.to_str())
    inner.add_tokens([": one user"])
    joined = tokenizers.FileTokenizer(inner, name="joined").with_template(template)
    assert learned(joined, talk("a", "two", "b", "one"))
    with pytest.raises(ValueError, match=r"tokenizer joined joins .* a special token there"):
        learned(joined, talk("a", "one", "b", "two"))


def test_marks_of_a_template_are_those_of_transformers(coders):
    transformers = pytest.importorskip("transformers")
    folder = coders["chatml_marked"]
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), tokenizers.load(folder)
    for messages in conversations(True):
        want = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True)
        found = chat.template_of(ours).render_to_learn(chat.Conversation(messages))
        ids, weights = chat.encode(ours, found)
        assert ids.tolist() == want["input_ids"] and weights.tolist() == want["assistant_masks"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("place", ["user", "assistant"])
def test_no_message_writes_a_special_token(style, place, coders):
    """Also not together with its neighbours; and the rest of the conversation stays the same."""
    ours = tokenizers.load(coders[style])
    special = set(ours.special.values()) - {ours.special.get("<unk>")}
    only = lambda ids: [token for token in ids if token in special]  # noqa: E731
    plain = talk("the", "model", "reads", "a")
    harmless, template = only(encoded(ours, plain)), chat.template_of(ours)
    untouched = template.render_to_learn(chat.Conversation(plain))
    turns = [untouched.text[begin:end] for begin, end in untouched.learned]
    at = 0 if place == "user" else 1
    for token in ours.special:
        for text in (token, f"x{token}", f"{token}\n{token}", token[:-1], token[1:], token[:2],
                     f"{token[:3]}{token}", f" {token} "):  # fmt: skip
            contents = ["the", "model", "reads", "a"]
            contents[at] = text
            messages = talk(*contents)
            assert only(encoded(ours, messages)) == harmless, text
            rendered = template.render_to_learn(chat.Conversation(messages))
            trimmed = "\n".join(line.strip() for line in text.strip().split("\n"))
            assert trimmed in rendered.text and chat._MARK not in rendered.text
            ids, weights = chat.encode(ours, rendered)
            kept = [rendered.text[begin:end] for begin, end in rendered.learned]
            assert trimmed in kept[0] if place == "assistant" else kept == turns
            # As many special tokens are learned as turns end, whatever the turns hold.
            assert len(only(ids[weights == 1].tolist())) == 2


@pytest.mark.parametrize("spaces", ["", " "])
def test_parts_of_a_special_token_do_not_join(spaces, coders):
    """Over two messages, and with what the template writes around them."""
    ours, token = tokenizers.load(coders["llama3"]), "<|eot_id|>"
    joined = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    for size in range(1, len(token)):
        parts = talk(f"a{token[:size]}{spaces}", f"{spaces}{token[size:]}b")
        middle = talk(f"{spaces}{token[size : size + 4]}")
        around = f"{token[:size]}{joined}{token[size + 4 :]}"
        cases = [
            (joined, parts), (around, middle), (f"{joined}{token[size:]}", parts[:1]),
            (f"{token[:size]}{joined}", parts[1:]),
        ]  # fmt: skip
        for template, messages in cases:
            rendered = chat.Template(template, ours).render(messages)
            assert token in rendered.text and rendered.special == ()
            assert ours.special[token] not in chat.encode(ours, rendered)[0]
    rendered = chat.Template(f"{joined}{token}", ours).render(
        talk("a <|", "eot", "|> b", token[:-1])
    )
    assert rendered.text == f"a <|eot|> b{token[:-1]}{token}" and len(rendered.special) == 1


def test_other_keys_of_a_message_are_text_too(tmp_path):
    template = "{% for m in messages %}{{ m.tool_calls | tojson }}<|eot_id|>{% endfor %}"
    ours = tokenizers.load(
        small_tokenizers.write(tmp_path, "byte_level", chat_template_jinja=template)
    )
    calls = [{"name": "<|eot_id|>", "arguments": {"<|eot_id|>": ["<|eot_id|>"]}}]
    messages = chat.checked([{"role": "assistant", "content": None, "tool_calls": calls}])
    rendered = chat.template_of(ours).render(messages)
    assert rendered.text == json.dumps(calls) + "<|eot_id|>"
    assert len(rendered.special) == 1
    ids, _ = chat.encode(ours, rendered)
    assert ids.tolist().count(ours.special["<|eot_id|>"]) == 1


def test_templates_reach_nothing_but_their_inputs(tmp_path):
    for template, message in (
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "not safe|access to attribute 'append'"),
        ("{{ raise_exception('no such turn') }}", "refuses the conversation: no such turn"),
        ("{{ messages[9].content }}", "refuses the conversation"),
    ):
        coder = tokenizers.ByteTokenizer().with_template(template)
        with pytest.raises(ValueError, match=message):
            chat.Template(template, coder).render(talk("a", "b"))
    with pytest.raises(ValueError, match="no Jinja, line 1"):
        chat.Template("{% if %}", tokenizers.ByteTokenizer())
    year = chat.Template("{{ strftime_now('%Y') }}", tokenizers.ByteTokenizer())
    assert year.render(talk("a")).text.isdigit()


# ---- files ----

GOOD = {"messages": talk("the model", "reads a text")}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, r"line 2: no messages in the record \(its keys: 'text'\): write"),
        ({"messages": []}, "line 2: messages is no list, or empty"),
        ({"messages": [3]}, "line 2: message 1 is a int: write an object with role and content"),
        ({"messages": talk("a")}, "line 2: no turn of the assistant, so that nothing is learned"),
        ({"prompt": talk("a", "b"), "completion": []}, "line 2: no turn of the assistant"),
        ({"messages": [{"role": "eot_id", "content": "a"}]}, "role 'eot_id': use one of system"),
        ({"messages": [{"role": "user"}]}, "message 1 has nothing as its content"),
        ({"messages": talk("a", "b")[::-1]}, "line 2: the chat template refuses .* must alternate"),
        ({"messages": talk("a", "b", "c", system=True)}, "System role not supported"),
        ({"messages": talk("a", "\ud800")}, "line 2: it has a lone surrogate"),
    ],
)  # fmt: skip
def test_a_bad_record_is_named(record, message, coders, tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(f"{json.dumps(GOOD)}\n{json.dumps(record)}\n{json.dumps(GOOD)}\n")
    made = dict(sources=(str(file),), tokenizer=str(coders["gemma"]), format="chat", held_out=0.0,
                cache_dir=str(tmp_path / "cache"))  # fmt: skip
    quiet = lambda _: None  # noqa: E731
    with pytest.raises(ValueError, match=message) as raised:
        dataset.open_dataset(config.DataConfig(**made), sequence_length=4, seed=0, log=quiet)
    assert "chats.jsonl" in str(raised.value) and "--skip-bad" in str(raised.value)
    said = []
    options = config.DataConfig(**made, skip_bad=True)
    dataset.open_dataset(options, sequence_length=4, seed=0, log=said.append)
    assert "left out by data.skip_bad: {'no conversation': 1}" in "".join(said)


def test_what_conversations_need_is_said(tmp_path, coders):
    text = tmp_path / "a.md"
    text.write_text("words " * 50)
    quiet = lambda _: None  # noqa: E731
    made = dict(held_out=0.0, cache_dir=str(tmp_path / "cache"), format="chat")
    for changes, message in (
        (dict(tokenizer="bytes"), "tokenizer bytes has no chat template: set data.chat_template"),
        (dict(tokenizer=str(coders["gemma"])), r"a\.md: conversations are read from \.jsonl"),
        (dict(chat_template="none.jinja"), r"data\.chat_template='none\.jinja' is no file"),
        (dict(train_tokenizer=300), "cannot be trained on conversations"),
    ):
        opened = config.DataConfig(sources=(str(text),), **made, **changes)
        with pytest.raises(ValueError, match=message):
            dataset.open_dataset(opened, sequence_length=4, seed=0, log=quiet)


# ---- rows ----


def write_chats(path, count):
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        for number in range(count):
            messages = talk(
                *(f"{number} {w}" for w in rng.choice(WORDS, size=rng.integers(1, 4) * 2))
            )
            file.write(json.dumps({"messages": messages}) + "\n")
    return str(path)


@pytest.mark.parametrize("pack", [True, False])
def test_rows_weigh_what_is_learned(pack, coders, tmp_path):
    """Token by token, over shards that are closed after every few conversations."""
    source, folder = write_chats(tmp_path / "chats.jsonl", 30), tmp_path / "shards"
    flags = ["--source", source, "--output", str(folder), "--format", "chat",
             "--tokenizer", str(coders["llama3"])]  # fmt: skip
    assert command.main([*flags, "--shard-tokens", "200"]) == 0
    assert command.main([*flags, "--shard-tokens", "200"]) == 0  # complete already
    assert command.main(["--verify", str(folder)]) == 0
    index = shards.read_index(folder)
    assert index["version"] == 2 and len(index["shards"]) > 3
    ours, T = tokenizers.load(coders["llama3"]), 16
    documents = []
    for line in pathlib.Path(source).read_text().splitlines():
        rendered = chat.template_of(ours).render_to_learn(chat.conversation(json.loads(line)))
        ids, weights = chat.encode(ours, rendered)
        pairs = list(zip(ids.tolist(), weights.tolist(), strict=True))
        documents.append([*pairs, (ours.end_of_document, 0)])
    streams = [list(itertools.chain(*documents))] if pack else documents
    first = {id(pair) for document in documents for pair in document[:1]}
    want = []
    for stream in streams:
        for begin in range(0, len(stream) - 1, T):
            row = [w * (id(pair) not in first) for pair in stream[begin + 1 : begin + T + 1]
                   for w in pair[1:]]  # fmt: skip
            want.append(row + [0] * (T - len(row)))
    rows = {}
    for name in (f"shards:{folder}", source):
        made = config.DataConfig(
            sources=(name,), held_out=0.0, shuffle=False, pack=pack, format="chat",
            tokenizer=str(coders["llama3"]), cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        opened = dataset.open_dataset(made, sequence_length=T, seed=0, log=lambda _: None)
        rows[opened.fingerprint] = opened.train_rows(0, range(len(want)), len(want))
    assert len(rows) == 1
    for found in rows.values():
        np.testing.assert_array_equal(found["weights"], np.array(want, np.float32))
    share = np.mean(want)
    assert 0.1 < share < 0.6


def test_what_is_learned_is_part_of_the_identity(coders, tmp_path):
    """Another template is another build; weights that are damaged or lost are noticed."""
    source = write_chats(tmp_path / "chats.jsonl", 4)
    made = dict(sources=(source,), format="chat", tokenizer=str(coders["chatml"]), held_out=0.0,
                cache_dir=str(tmp_path / "cache"))  # fmt: skip
    opened = []
    for template in ("", str(coders["chatml_marked"] / "chat_template.jinja")):
        this = config.DataConfig(**made, chat_template=template)
        opened.append(dataset.open_dataset(this, sequence_length=8, seed=0, log=lambda _: None))
    assert opened[0].fingerprint == opened[1].fingerprint  # the same tokens and weights
    folders = sorted((tmp_path / "cache").glob("chats_jsonl-*"))
    assert len(folders) == 2
    assert "{%- generation %}" in opened[1].tokenizer.template
    weights = folders[0] / "shard-00000.weights"
    raw = weights.read_bytes()
    weights.write_bytes(bytes([1 - raw[0]]) + raw[1:])
    with pytest.raises(ValueError, match=r"weights: checksum mismatch"):
        shards.open_shards(folders[0])
    weights.unlink()
    with pytest.raises(ValueError, match=r"weights is missing"):
        shards.open_shards(folders[0])


def test_preview_shows_tokens_and_weights(coders, tmp_path, capsys, monkeypatch):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": talk("the", "日本🙂 <|eot_id|>")}) + "\n")
    flags = ["--source", str(file), "--format", "chat", "--tokenizer", str(coders["llama3"])]
    assert command.main([*flags, "--preview"]) == 0
    said = capsys.readouterr().out
    lines = [line.split(maxsplit=2) for line in said.splitlines()[1:]]
    assert "\x1b" not in said and said.startswith("--- document 1: ")
    assert ["0", "500", "<|begin_of_text|>"] in lines and ["1", "504", "<|eot_id|>"] in lines
    assert sum(line[2] == "<|eot_id|>" for line in lines) == 2
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert command.main([*flags, "--preview", "1"]) == 0
    said = capsys.readouterr().out
    assert "\x1b[32m日本🙂 <|eot_id|>\x1b[0m\x1b[32m\x1b[4m<|eot_id|>\x1b[0m" in said
    monkeypatch.setenv("NO_COLOR", "1")
    assert command.main([*flags, "--preview", "1"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert command.main(["--source", str(file), "--preview", "-1"]) == 2


def test_parts_that_a_template_writes_as_python_does_are_refused(tmp_path):
    ours = tokenizers.load(small_tokenizers.write(tmp_path, "byte_level"))
    parts = [{"type": "text", "text": "What is it?"}]
    messages = chat.checked([{"role": "user", "content": parts}])
    naive = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"message 1 has a list of parts .* through parts"):
        chat.Template(naive, ours).render(messages)
    through = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert chat.Template(through, ours).render(messages).text == "What is it?"
