"""Records of conversations and pairs: what they say twice, and what they say beside the words."""

import json
import re

import pytest

from llmx.data import chat, config, dataset, pairs, tokenizers, turns

TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% if mode is defined %}({{ mode }}){% endif %}"
    "{% for m in messages %}{{ m.role[0] + (m.content or '') + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
END = tokenizers.END_TOKENS[0]


def talk(text: str) -> list[dict]:
    """Messages of "u:question a:answer"."""
    roles = {role[0]: role for role in ("system", "user", "assistant", "tool")}
    return [{"role": roles[one[0]], "content": one[2:]} for one in text.split()]


def rendered(record, template=TEMPLATE):
    """The text of a record, with what is learned in <>."""
    made = chat.Template(template, tokenizers.ByteTokenizer())
    _, found = chat.read_record(record, made)
    return marked(found)


def marked(found: chat.Rendered) -> str:
    text = found.text
    for begin, end in reversed(found.learned):
        text = f"{text[:begin]}<{text[begin:end]}>{text[end:]}"
    return text.replace(END, "#")


def both(record, template=TEMPLATE):
    made = chat.Template(template, tokenizers.ByteTokenizer())
    _, found = pairs.read_record(record, made)
    return marked(found.chosen), marked(found.rejected)


def pair(prompt, chosen, rejected, **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | more


ONE = ("uq#a<good#>", "uq#a<bad#>")
LONG = ("ub#ac#uq#a<good#>", "ub#ac#uq#a<bad#>")


@pytest.mark.parametrize(("record", "wanted"), [
    (pair("q", "good", "bad"), ONE),
    (pair("q", talk("a:good"), talk("a:bad")), ONE),
    (pair("q", talk("a:good")[0], talk("a:bad")[0]), ONE),
    (pair("q", talk("u:q a:good"), talk("u:q a:bad")), ONE),
    (pair(" q\n", talk("u:q a:good"), talk("u:q a:bad")), ("u q\n#a<good#>", "u q\n#a<bad#>")),
    (pair("q", talk("u:q a:good"), "bad"), ONE),
    (pair(talk("u:q"), talk("u:q a:good"), talk("a:bad")), ONE),
    (pair([{"role": "user", "content": "q", "name": None}], talk("u:q a:good"), "bad"), ONE),
    ({"chosen": talk("u:q a:good"), "rejected": talk("u:q a:bad")}, ONE),
    (pair(None, talk("u:q a:good"), talk("u:q a:bad")), ONE),
    (pair([], talk("u:q a:good"), talk("u:q a:bad")), ONE),
    # Longer prompts: repeated whole, in part, and with what stands before.
    (pair(talk("u:b a:c u:q"), "good", "bad"), LONG),
    (pair(talk("u:b a:c u:q"), talk("u:b a:c u:q a:good"), talk("u:b a:c u:q a:bad")), LONG),
    (pair(talk("u:b a:c u:q"), talk("u:q a:good"), talk("u:q a:bad")), LONG),
    (pair("q", talk("u:b a:c u:q a:good"), talk("u:b a:c u:q a:bad")), LONG),
    (pair(talk("u:b a:c"), talk("u:q a:good"), talk("u:q a:bad")),
     ("ub#ac#uq#a<good#>", "ub#ac#uq#a<bad#>")),
    (pair("q", talk("s:s u:q a:good"), talk("s:s u:q a:bad")), ("ss#uq#a<good#>", "ss#uq#a<bad#>")),
    (pair(talk("s:s u:q"), talk("u:q a:good"), talk("u:q a:bad")),
     ("ss#uq#a<good#>", "ss#uq#a<bad#>")),
    (pair(talk("s:s"), talk("u:q a:good"), talk("u:q a:bad")),
     ("ss#uq#a<good#>", "ss#uq#a<bad#>")),
    (pair(talk("u:q a:q"), talk("u:q a:good"), talk("u:q a:bad")),
     ("uq#aq#uq#a<good#>", "uq#aq#uq#a<bad#>")),
    (pair("q", "good", "bad", system="s"), ("ss#uq#a<good#>", "ss#uq#a<bad#>")),
    # Other fields of public records: the chosen conversation once more, scores, ids.
    (pair("q", talk("u:q a:good"), talk("u:q a:bad"), messages=talk("u:q a:good"),
          score_chosen=9.5, prompt_id="x", source="y"), ONE),
    ({"messages": talk("u:q"), "chosen": talk("a:good")[0], "rejected": "bad"}, ONE),
    (pair("q", "good", "bad", tools='[{"n": 1}]', chat_template_kwargs={"mode": "high"}),
     ('[[{"n": 1}]](high)uq#a<good#>', '[[{"n": 1}]](high)uq#a<bad#>')),
])  # fmt: skip
def test_a_pair_is_what_its_forms_say(record, wanted):
    assert both(record) == wanted


MORE = ("uq#aone#ur#a<good#>", "uq#aone#ur#a<bad#>")


@pytest.mark.parametrize(("prompt", "chosen", "rejected", "wanted"), [
    (None, "u:q a:one u:r a:good", "u:q a:one u:r a:bad", MORE),
    ("q", "u:q a:one u:r a:good", "u:q a:one u:r a:bad", MORE),
    ("r", "u:q a:one u:r a:good", "u:q a:one u:r a:bad", MORE),
    (talk("u:q"), "u:q a:one u:r a:good", "u:q a:one u:r a:bad", MORE),
    (talk("u:q"), "a:one u:r a:good", "a:one u:r a:bad", MORE),
    (talk("u:q a:one"), "u:q a:one u:r a:good", "u:r a:bad", MORE),
    # Answers that differ early are answers from there on.
    ("q", "u:q a:one u:r a:good", "u:q a:uno u:r a:bad",
     ("uq#a<one#>ur#a<good#>", "uq#a<uno#>ur#a<bad#>")),
    # One that goes on behind the other.
    ("q", "u:q a:one", "u:q a:one u:r a:bad", ("uq#a<one#>", "uq#a<one#>ur#a<bad#>")),
    (None, "u:q a:one", "u:q a:one u:r a:bad", ("uq#a<one#>", "uq#a<one#>ur#a<bad#>")),
    # A greeting first, and a prompt that has it.
    (talk("a:hi u:q"), "a:hi u:q a:good", "a:bad", ("ahi#uq#a<good#>", "ahi#uq#a<bad#>")),
])  # fmt: skip
def test_what_both_begin_with_is_the_prompt(prompt, chosen, rejected, wanted):
    """Whether a prompt says a part of it once more or not."""
    assert both(pair(prompt, talk(chosen), talk(rejected))) == wanted


def test_a_text_may_begin_with_the_words_of_its_prompt():
    """Nobody knows whether the answer repeats the question."""
    assert both(pair("q", "q good", "bad")) == ("uq#a<q good#>", "uq#a<bad#>")
    assert rendered({"prompt": "q", "completion": "q good"}) == "uq#a<q good#>"


def test_parts_of_text_say_the_same_as_the_text():
    parts = {"role": "user", "content": [{"type": "text", "text": "q"}]}
    assert turns.same(parts, talk("u:q")[0]) and not turns.same(parts, talk("u:other")[0])
    assert not turns.same(parts, talk("a:q")[0])


@pytest.mark.parametrize(("record", "said"), [
    (pair("q", talk("u:other a:good"), talk("u:q a:bad")), "prompt and chosen contradict"),
    (pair("q", talk("u:q a:good"), talk("u:other a:bad")), "prompt and rejected contradict"),
    (pair(talk("s:s u:q"), talk("s:other u:q a:good"), "bad"), "prompt and chosen contradict"),
    (pair("q", talk("s:s u:q a:good"), talk("u:q a:bad")), "answer different prompts"),
    (pair("q", "good", "bad", messages=talk("u:other a:good")), "messages is neither"),
    (pair(talk("s:s u:q"), "good", "bad", system="t"), "system and the first message contradict"),
    (pair("q", "good", "bad", history=[["b", "c"]]), "history holds earlier turns"),
    (pair("q", "good", "bad", images=["x.png"]), "has 'images', and text alone is read"),
    ({"chosen": "a", "rejected": talk("a:b")}, "neither .* begins with what is asked"),
    ({"chosen": talk("a:b u:q a:good"), "rejected": talk("a:b u:q a:bad")},
     "neither .* begins with what is asked: add a prompt"),
])  # fmt: skip
def test_pairs_that_contradict_themselves(record, said):
    with pytest.raises(ValueError, match=said):
        both(record)


TOOL = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(("record", "wanted"), [
    ({"prompt": "q", "completion": talk("u:q a:good")}, "uq#a<good#>"),
    ({"prompt": talk("u:b a:c u:q"), "completion": talk("u:q a:good")}, "ub#ac#uq#a<good#>"),
    ({"prompt": "q", "messages": talk("u:q a:good")}, "uq#a<good#>"),
    ({"prompt": "q", "messages": talk("u:b a:c u:q a:good")}, "ub#a<c#>uq#a<good#>"),
    ({"prompt": talk("u:b a:c u:q"), "messages": talk("u:b a:c u:q a:good")}, "ub#ac#uq#a<good#>"),
    ({"prompt": "q", "completion": "good", "messages": talk("u:q a:good")}, "uq#a<good#>"),
    ({"messages": talk("u:q a:good"), "system": "s", "id": 3, "source": "x", "score": 0.5},
     "ss#uq#a<good#>"),
    ({"messages": talk("s:s u:q a:good"), "system": "s"}, "ss#uq#a<good#>"),
    ({"prompt": talk("u:b a:c u:q"), "completion": "good", "system_prompt": "s"},
     "ss#ub#ac#uq#a<good#>"),
    ({"messages": talk("u:q a:good"), "system": "", "tools": None, "images": []}, "uq#a<good#>"),
    # What a template takes.
    ({"messages": talk("u:q a:good"), "tools": TOOL}, f"[{json.dumps(TOOL)}]uq#a<good#>"),
    ({"messages": talk("u:q a:good"), "tools": json.dumps(TOOL)},
     f"[{json.dumps(TOOL)}]uq#a<good#>"),
    ({"messages": talk("u:q a:good"), "mode": "high"}, "(high)uq#a<good#>"),
    ({"messages": talk("u:q a:good"), "chat_template_kwargs": '{"mode": "endo"}'},
     "(endo)uq#a<good#>"),
    ({"messages": talk("u:q a:good"), "enable_thinking": False}, "uq#a<good#>"),
    # Turns that are not learned.
    ({"messages": [*talk("u:b"), {"role": "assistant", "content": "c", "weight": 0},
                   *talk("u:q a:good")]}, "ub#ac#uq#a<good#>"),
    ({"messages": [*talk("u:b"), {"role": "assistant", "content": "c", "train": True},
                   {"role": "user", "content": "q", "train": False}, *talk("a:good")],
      "system": "s"},
     "ss#ub#a<c#>uq#a<good#>"),
])  # fmt: skip
def test_a_conversation_is_what_its_record_says(record, wanted):
    assert rendered(record) == wanted


@pytest.mark.parametrize("value", [0, False, 0.0])
@pytest.mark.parametrize("key", [
    "weight", "train", "trainable", "training", "loss", "loss_weight", "loss_mask", "learn",
])  # fmt: skip
def test_a_flag_says_that_a_turn_is_not_learned(key, value):
    record = {"messages": talk("u:b a:c u:q a:good")}
    record["messages"][1][key] = value
    assert rendered(record) == "ub#ac#uq#a<good#>"
    record["messages"][1][key] = 1
    assert rendered(record) == "ub#a<c#>uq#a<good#>"


@pytest.mark.parametrize("more", [{"tools": TOOL}, {"chat_template_kwargs": {"mode": "high"}}])
def test_a_template_that_would_leave_something_out(more):
    with pytest.raises(ValueError, match=r"the record has '\w+', which the chat template does not"):
        rendered({"messages": talk("u:q a:good")} | more, MARKED)


def test_thoughts_that_a_template_drops_on_purpose():
    """Those of earlier turns; the word is that of a variable of the template, too."""
    template = TEMPLATE.replace("(m.content or '')", "(thought or '') + m.content").replace(
        "{{ m.role[0]",
        "{% if loop.last and m.thought %}{% set thought = m.thought %}{% endif %}{{ m.role[0]",
    )
    messages = talk("u:b a:c u:q a:good")
    messages[1]["thought"] = "why"
    assert rendered({"messages": messages}, template) == "ub#a<c#>uq#a<good#>"


# In the manner of published templates: each leaves something out.
CALLS_ALONE = (  # Llama 3.1, Mistral v0.3
    "{% for m in messages %}{{ m.role[0] }}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}"
    "[{{ (c.function or c).name }}]{% endfor %}{% else %}{{ m.content }}{% endif %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
CONTENT_ALONE = (  # DeepSeek-V3: an empty content is one, too
    "{% for m in messages %}{{ m.role[0] }}{% if m.content is defined %}{{ m.content }}{% else %}"
    "{% for c in m.tool_calls %}[{{ c.name }}]{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
TWO_ROLES = (  # the first of Phi-3
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role[0] + m.content }}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
STRINGS = (  # Qwen 3, of which parts are no text
    "{% for m in messages %}{{ m.role[0] }}{% if m.content is string %}{{ m.content }}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
FIRST_PART = TEMPLATE.replace("(m.content or '')", "m.content[0].text")
LAST_CALL = CALLS_ALONE.replace("for c in m.tool_calls", "for c in m.tool_calls[-1:]")
# Thoughts of the last turn; what reads none has a variable of that name.
LAST_THOUGHT = TEMPLATE.replace(
    "{{ m.role[0] +", "{{ m.role[0] + ('(' + m.NAME + ')' if m.NAME and loop.last else '') +"
)
VARIABLE = "{% if thinking %}think{% endif %}" + TEMPLATE
LAST_CONTENT = (  # the words beside a call are thoughts, which gpt-oss drops once an answer follows
    "{% for m in messages %}{{ m.role[0] }}{% if not m.tool_calls %}{{ m.content }}{% else %}"
    "{% if loop.last %}{{ m.content }}{% endif %}[{{ m.tool_calls[0].name }}]{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
CALL_AT_END = LAST_CONTENT.replace(
    "{{ m.content }}{% endif %}[{{ m.tool_calls[0].name }}]",
    "[{{ m.tool_calls[0].name }}]{% endif %}",
)


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def calling(content, *names):
    calls = [{"name": name} for name in names]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def of_transformers(messages, template):
    """The text that it renders."""
    library = pytest.importorskip("transformers.utils.chat_template_utils")
    found, _ = library.render_jinja_template(
        conversations=[messages], chat_template=template, eos_token="#"
    )
    return found[0]


def thinking(key, content="good"):
    return {"role": "assistant", "content": content, key: "why"}


@pytest.mark.parametrize(("template", "messages", "said"), [
    (CALLS_ALONE, [*talk("u:q"), calling("hm", "f")],
     "message 2, of the role 'assistant': .* its content beside its tool_calls: remove one of the"),
    (CALLS_ALONE, [*talk("u:q"), calling("hm")], "not write its content beside its tool_calls"),
    (LAST_CALL, [*talk("u:q"), calling("", "f", "g")], "message 2, .* not write its tool_calls"),
    (CONTENT_ALONE, [*talk("u:q"), calling("", "f"), *talk("t:20 a:good")],
     "message 2, of the role 'assistant': .* not write its tool_calls: remove it, or use a"),
    (TWO_ROLES, talk("s:s u:q a:good"),
     "message 1, of the role 'system': .* not write its content: remove the message, or use a"),
    (TWO_ROLES, talk("u:q t:20 a:good"), "message 2, of the role 'tool': .* write its content"),
    (STRINGS, [{"role": "user", "content": parts("q")}, *talk("a:good")],
     "message 1, of the role 'user': .* all of its list of parts: write a string as its content"),
    (STRINGS, [*talk("u:q"), {"role": "assistant", "content": parts("good")}], "message 2, .*list"),
    (FIRST_PART, [{"role": "user", "content": parts("q", "r")},
                  {"role": "assistant", "content": parts("good")}], "message 1, .* list of parts"),
    (CALL_AT_END, [*talk("u:q"), calling("", "f"), *talk("t:20 a:good")],
     "message 2, .* not write its tool_calls"),
    (VARIABLE, [*talk("u:q"), thinking("reasoning_content")],
     "message 2, .* not write its reasoning_content: remove it, or use a"),
])  # fmt: skip
def test_what_a_template_leaves_out_is_refused(template, messages, said):
    """As `transformers` leaves it out in silence."""
    assert of_transformers(messages, template)
    with pytest.raises(ValueError, match=said):
        rendered({"messages": messages}, template)


@pytest.mark.parametrize(("template", "messages", "wanted"), [
    (CALLS_ALONE, [*talk("u:q"), calling("", "f"), *talk("t:20 a:good")],
     "uq#a<[f]#>t20#a<good#>"),
    (CALLS_ALONE, [*talk("u:q"), calling(" \n", "f", "g")], "uq#a<[f][g]#>"),
    (TWO_ROLES, [{"role": "system", "content": " "}, *talk("u:q a:good")], "uq#a<good#>"),
    (TWO_ROLES, [{"role": "system", "content": ""}, *talk("u:q a:good")], "uq#a<good#>"),
    (FIRST_PART, [{"role": "user", "content": parts("q", " ")},
                  {"role": "assistant", "content": parts("good")}], "uq#a<good#>"),
    (LAST_THOUGHT.replace("NAME", "thinking"),
     [*talk("u:b"), thinking("thinking", "c"), *talk("u:q"), thinking("thinking")],
     "ub#a<c#>uq#a<(why)good#>"),
    (LAST_CONTENT, [*talk("u:q"), calling("hm", "f"), *talk("t:20 a:good")],
     "uq#a<[f]#>t20#a<good#>"),
    # Words that a template looks for, or that it takes away.
    (TEMPLATE.replace("(m.content or '')", "m.content.replace('/no', '')"),
     talk("s:/no u:q/no a:good"), "s#uq#a<good#>"),
    (TEMPLATE.replace("(m.content or '')", "(m.content | trim | upper)"), talk("u:q a:good"),
     "uQ#a<GOOD#>"),
    (TEMPLATE.replace("(m.content or '')", "(m.content | tojson)"), talk("u:q a:good"),
     'u"q"#a<"good"#>'),
])  # fmt: skip
def test_what_a_template_leaves_out_on_purpose(template, messages, wanted):
    assert rendered({"messages": messages}, template) == wanted
    assert of_transformers(messages, template) == wanted.replace("<", "").replace(">", "")


# Where a generation prompt and the start of a text are written, with what is before an answer.
TURN = "({{ m.role }})\n{{ m.content + eos_token }}\n"
PROMPT = "{% if add_generation_prompt %}(assistant)\n{% endif %}"
INSIDE = f"{{% for m in messages %}}{TURN}{{% if loop.last %}}{PROMPT}{{% endif %}}{{% endfor %}}"
OPENINGS = {
    "inside the loop": (INSIDE, ""),
    "inside, behind a start": ("[start]" + INSIDE, "[start]"),
    "behind a default": (
        "{% if messages[0].role != 'system' %}(system)\nkind\n{% endif %}" + INSIDE,
        "(system)\nkind\n",
    ),
    "the start is of the first turn": (
        "{% for m in messages %}{% if loop.first %}[start]{% endif %}" + TURN
        + "{% endfor %}" + PROMPT,
        "[start]",
    ),
    "outside": ("{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT, ""),
    "behind a system prompt that is none of the turns": (
        "{% if messages[0].role == 'system' %}{% set turns = messages[1:] %}"
        "{{ messages[0].content }}{% else %}{% set turns = messages %}{% endif %}"
        + INSIDE.replace("in messages", "in turns"),
        "",
    ),
    "always one": ("{% for m in messages %}" + TURN + "{% endfor %}(assistant){{ '\n' }}", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OPENINGS)
@pytest.mark.parametrize("content", ["hi", "", "(assistant)", "\nassistant"])
def test_the_header_of_an_answer_that_opens_is_not_learned(name, content):
    template, start = OPENINGS[name]
    messages = [{"role": "assistant", "content": content}, *talk("u:q a:good")]
    text = f"(assistant)\n<{content}#>\n(user)\nq#\n(assistant)\n<good#>\n"
    text += "(assistant)\n" * (name == "always one")
    assert rendered({"messages": messages}, template) == start + text
    plain = start + text.replace("<", "").replace(">", "")
    assert of_transformers(messages, template) == plain
    told = [{"role": "system", "content": "s"}, *messages]
    told = rendered({"messages": told}, template)
    assert told.endswith(text) and "<" not in told.removesuffix(text)
    alone = rendered({"messages": messages[:1]}, template)
    assert alone.removesuffix("(assistant)\n") == f"{start}(assistant)\n<{content}#>\n"


def test_an_opening_without_a_header():
    """A greeting; other answers have one."""
    greeting = "{% if loop.first and m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}"
    template = INSIDE.replace(TURN, f"{greeting}{TURN}{{% endif %}}")
    text = "<hi#>(user)\nq#\n(assistant)\n<good#>\n"
    assert rendered({"messages": talk("a:hi u:q a:good")}, template) == text


def test_an_opening_that_cannot_be_found_is_refused():
    """The template writes no header, and nothing without messages."""
    template = "{{ messages[0].role[0] }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="refuses the conversation: list object has no element 0"):
        rendered({"messages": talk("a:hi u:q a:good")}, template)


@pytest.mark.parametrize("reads", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_it_has_in_transformers(reads, key, tmp_path):
    transformers = pytest.importorskip("transformers")
    from support import small_tokenizers

    template = LAST_THOUGHT.replace("NAME", reads)
    folder = small_tokenizers.write(tmp_path, "byte_level", chat_template_jinja=template)
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(folder), tokenizers.load(folder)
    )  # fmt: skip
    messages = [*talk("u:q"), thinking(key)]
    want = theirs.apply_chat_template(messages, tokenize=False)
    if "why" not in want:  # a name that transformers adds to no message
        with pytest.raises(ValueError, match=f"message 2, .* does not write its {key}|has '{key}'"):
            chat.read_record({"messages": messages}, chat.template_of(ours))
        return
    _, found = chat.read_record({"messages": messages}, chat.template_of(ours))
    assert found.text == want and "(why)good" in want
    # The same under two names is one thing.
    twice = {"prompt": messages, "messages": [messages[0], thinking(reads)], "completion": []}
    twice["prompt"] = messages[:1]
    assert chat.read_record(twice, chat.template_of(ours))[1] == found
    assert turns.same(messages[1], thinking(reads))


def test_turns_that_are_not_learned_beside_generation():
    record = {"messages": talk("u:1 a:2 u:3 a:4 u:5 a:6")}
    assert rendered(record, MARKED) == "u1#a<2#>u3#a<4#>u5#a<6#>"
    record["messages"][3]["weight"] = 0
    assert rendered(record, MARKED) == "u1#a<2#>u3#a4#u5#a<6#>"
    record = {"prompt": record["messages"][:2], "completion": record["messages"][2:]}
    assert rendered(record, MARKED) == "u1#a2#u3#a4#u5#a<6#>"


def message(**more):
    return {"messages": [*talk("u:q"), {"role": "assistant", "content": "good"} | more]}


@pytest.mark.parametrize(("record", "said"), [
    ({"prompt": "other", "messages": talk("u:q a:good")}, "prompt and messages contradict"),
    ({"completion": "other", "messages": talk("u:q a:good")}, "completion and messages contradict"),
    ({"prompt": "q", "completion": talk("u:other a:good")}, "prompt and completion contradict"),
    ({"messages": talk("s:s u:q a:good"), "system": "t"}, "system and the first message"),
    ({"messages": talk("u:q a:good"), "system": ["t"]}, "system is a list"),
    (message(weight=0), "no turn of the assistant, so that nothing is learned"),
    (message(weight=0.5), r"message 2 has weight=0.5: a turn is learned \(1, true\) or not"),
    (message(train="no"), 'message 2 has train="no"'),
    ({"messages": [{"role": "user", "content": "q", "weight": 1}, *talk("a:good")]},
     "message 1 has weight=1 and the role 'user': only turns of the assistant"),
    (message(images=["x"]), "message 2 has 'images', and text alone is read"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, *talk("a:good")]},
     "message 1 has 'image', and text alone is read"),
    (message(tool_calls=[{"name": "f"}]), "has 'tool_calls', which the chat template does not"),
    (message(reasoning_content="why"), "has 'reasoning_content', which the chat template does not"),
    (message() | {"images": ["x"]}, "the record has 'images'"),
    (message() | {"documents": [{"text": "d"}]}, "has 'documents', which the chat template does"),
    (message() | {"enable_thinking": True}, "has 'enable_thinking', which the chat template does"),
    (message() | {"chat_template_kwargs": {"effort": 1}}, "has 'effort', which the chat template"),
    (message() | {"chat_template_kwargs": {"messages": []}}, "has 'messages', which llmx sets"),
    (message() | {"chat_template_kwargs": {"eos_token": "x"}}, "eos_token is the tokenizer's"),
    (message() | {"chat_template_kwargs": {"mode": 1}, "mode": 2}, "mode and chat_template_kwargs"),
    (message() | {"tools": "f"}, "tools is a string that is no JSON"),
    (message() | {"tools": {"f": 1}}, "tools is a dict: write a list"),
    (message() | {"tools": ["f"]}, "tools holds what is no object"),
    (message() | {"weight": 0.5}, "weight=0.5 of a record is not read"),
    (message() | {"train": False}, "train=false of a record is not read"),
    (message(train_detail=[]), "message 2 has 'train_detail', which is not read"),
    (message(mask=True), "message 2 has 'mask', which is not read"),
    (message(masked=False), "message 2 has 'masked', which is not read"),
    (message(ignore=True), "message 2 has 'ignore', which is not read"),
    (message() | {"mask": "user"}, "the record has 'mask', which is not read"),
    (message(loss_weight=0.5), "message 2 has loss_weight=0.5"),
    (message(tools=TOOL), "has 'tools', which the chat template does not write"),
    (message(reasoning="why", thinking="how"), "message 2 has thinking and reasoning, which"),
    (message(reasoning_content="", reasoning="why"), "has reasoning_content and reasoning, which"),
    (message(thought="why"), "has 'thought', which the chat template does not write"),
    ({"prompt": "q", "completion": "good", "history": [["b", "c"]]}, "history holds earlier turns"),
    ({"prompt": "q", "completion": "good", "label": False}, "label says whether the answer"),
])  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(record, said):
    with pytest.raises(ValueError, match=said):
        rendered(record)


def test_a_refusal_names_the_line(tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    lines = [message(), message() | {"images": ["x"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    values = config.DataConfig(
        sources=(str(tmp_path / "a.jsonl"),), chat_template=str(tmp_path / "t.jinja"),
        format="chat", cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"a\.jsonl: line 2: the record has 'images'"):
        dataset.open_dataset(values, sequence_length=8, seed=0, log=lambda line: None)


@pytest.mark.parametrize("depth", [600, 900, 50_000])
@pytest.mark.parametrize("format", ["chat", "preference"])
def test_a_record_that_is_nested_too_deep_is_named(depth, format, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    record = message() if format == "chat" else pair("q", "good", "bad")
    deep = "[" * depth + "]" * depth
    lines = [json.dumps(record), json.dumps(record)[:-1] + f', "tools": [{{"a": {deep}}}]}}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    values = config.DataConfig(
        sources=(str(tmp_path / "a.jsonl"),), chat_template=str(tmp_path / "t.jinja"),
        format=format, pack=False, held_out=0.0, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    length = 32 if format == "chat" else 8192  # a pair is not cut
    try:
        dataset.open_dataset(values, sequence_length=length, seed=0, log=lambda line: None)
    except ValueError as error:
        assert re.search(r"a\.jsonl: line 2\b.*(nested too deep|recursion).*: write ", str(error))
    else:
        assert depth < 50_000  # versions of Python differ in what they can read


def test_a_record_cannot_write_a_special_token():
    """Neither in tools nor in other arguments."""
    made = chat.Template(TEMPLATE, tokenizers.ByteTokenizer())
    record = message() | {"tools": [{"name": END}], "mode": END}
    _, found = chat.read_record(record, made)
    assert found.text.count(END) == 4 and len(found.special) == 2
    _, other = chat.read_record(message() | {"tools": [{"name": "x"}], "mode": "y"}, made)
    assert len(other.special) == 2


def test_tools_reach_the_template_as_with_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from support import small_tokenizers

    folder = small_tokenizers.write(tmp_path, "byte_level", chat_template_jinja=TEMPLATE)
    theirs, ours = (
        transformers.AutoTokenizer.from_pretrained(folder), tokenizers.load(folder)
    )  # fmt: skip
    record = message() | {"tools": TOOL, "chat_template_kwargs": {"mode": "high"}}
    _, found = chat.read_record(record, chat.template_of(ours))
    want = theirs.apply_chat_template(record["messages"], tools=TOOL, mode="high")["input_ids"]
    assert chat.encode(ours, found)[0].tolist() == want
