"""Conversations to tokens: a Jinja template writes them, and the assistant's turns are learned.

What a message holds is never read as a special token. Before a template is run, marks that no text
can hold are put before special tokens in messages, and where a message ends or begins with a part
of one. Special tokens of the rendered text without a mark are the template's own.

Learned is what the template puts into `{% generation %}`, or else what it writes for a turn behind
the text that the turns before render to with a generation prompt, whatever turns follow.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llmx.data import json_files, template_process, tokenizer_files, tokenizers, turns
from llmx.data.rendered import Rendered, closing_tokens, end_with_prompt, num_shared, until_header

ROLES = (
    "system", "developer", "user", "assistant", "tool", "function", "ipython", "environment",
)  # fmt: skip
ASSISTANT = "assistant"
FORMATS = ("chat", "preference")  # of `DataConfig.format`, those that a chat template renders
MAX_BYTES = 4 << 20  # of a conversation; it is encoded whole
_TOGETHER = 1 << 18  # characters of a conversation times its turns that are rendered together
# Digits stay what they are in whatever a template does to a text, but for cutting it.
_MARK, _BREAK, _BEGIN, _END, _CONTENT_END = (f"{secrets.randbits(100):031d}" for _ in range(5))
_NO_TEXT = ("role", "type")  # keys whose values templates compare
_NEXT = {"role": "user", "content": "1"}  # of a conversation that goes on
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages, of which the assistant's are learned from number `first` on.

    arguments: what the template is given beside the messages, by name.
    unlearned: the numbers of messages that are not learned.
    """

    messages: Messages
    first: int = 0
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unlearned: tuple[int, ...] = ()

    def canonical(self) -> bytes:
        """The same bytes for the same conversation, however it was written."""
        found = [self.messages, self.first] if self.first else self.messages
        if self.arguments or self.unlearned:
            found = [self.messages, self.first, self.arguments, self.unlearned]
        text = json.dumps(found, ensure_ascii=False, sort_keys=True)
        try:
            return text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("it has a lone surrogate, which is not valid UTF-8") from error


def conversation(record: Mapping[str, Any], known: Collection[str] = ()) -> Conversation:
    """That of a record with `messages`, or with `prompt` and `completion`.

    known: names that the template takes beside messages. Raises ValueError where there is none, a
    role is unknown, the assistant says nothing, or a field cannot be used.
    """
    first, prompt, completion = 0, record.get("prompt"), record.get("completion")
    if record.get("messages") is not None:
        messages = checked(record["messages"])
        if prompt:
            at = turns.find(stated := as_messages(prompt, "user"), messages)
            if at is None:
                raise ValueError("prompt and messages contradict each other: write messages alone")
            first = at + len(stated) if isinstance(prompt, list) else 0
        if completion:
            stated = as_messages(completion, ASSISTANT)
            if not turns.all_same(stated, messages[-len(stated) :]):
                raise ValueError(
                    "completion and messages contradict each other: write messages alone"
                )
    elif {"prompt", "completion"} <= record.keys():
        before, behind = as_messages(prompt, "user"), as_messages(completion, ASSISTANT)
        messages, first = turns.joined(before, behind, ("prompt", "completion"))
    else:
        names = ", ".join(map(repr, list(record)[:10])) or "none"
        raise ValueError(
            f"no messages in the record (its keys: {names}): write "
            '{"messages": [{"role": "user", "content": "..."}, ...]}, or prompt and completion'
        )
    return assembled(messages, first, record, known)


def assembled(
    messages: Messages, first: int, record: Mapping[str, Any], known: Collection[str]
) -> Conversation:  # fmt: skip
    """Messages with what else their record says of them. Raises ValueError."""
    before = len(checked(messages))
    messages = turns.with_system(messages, record)
    first += len(messages) - before if first else 0
    messages, unlearned = turns.without_flags(messages)
    learned = {number for number in range(first, len(messages))} - {*unlearned}
    if not any(messages[number]["role"] == ASSISTANT for number in learned):
        raise ValueError("no turn of the assistant, so that nothing is learned: remove the record")
    unlearned = tuple(n for n in unlearned if messages[n]["role"] == ASSISTANT and n >= first)
    return Conversation(messages, first, turns.arguments(record, known), unlearned)


def as_messages(value: Any, role: str) -> Messages:
    """A field of a record as messages: it is a list of these, one, or the text of one."""
    value = [value] if isinstance(value, dict) else value
    value = value if isinstance(value, list) else [{"role": role, "content": value}]
    return [_message(number, message) for number, message in enumerate(value, 1)]


def checked(messages: Any) -> Messages:
    """Messages as templates take them, without keys that are null. Raises ValueError."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is no list, or empty: write a list of objects, one a turn")
    return [_message(number, message) for number, message in enumerate(messages, 1)]


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        kind = type(message).__name__
        raise ValueError(f"message {number} is a {kind}: write an object with role and content")
    message = {key: value for key, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {role!r}: use one of {', '.join(ROLES)}")
    if not isinstance(content, str | list) and not (content is None and "tool_calls" in message):
        kind = "nothing" if content is None else type(content).__name__
        raise ValueError(f"message {number} has {kind} as its content: write a string")
    return message


class Template:
    """A chat template with the special tokens of a tokenizer."""

    def __init__(self, source: str, tokenizer: tokenizers.Tokenizer):
        """Raises ValueError where the template is empty or no Jinja."""
        if not source.strip():
            raise ValueError(
                f"tokenizer {tokenizer.name} has no chat template: set data.chat_template to a "
                "Jinja file, or put a chat_template.jinja beside the tokenizer.json"
            )
        (found,) = template_process.ask(source, (_BEGIN, _END))
        if "refused" in found:
            line = f", line {found['line']}" if "line" in found else ""
            raise ValueError(f"the chat template is no Jinja{line}: {found['refused']}: correct it")
        # Names that the template takes beside messages, and all that it has words for.
        self.variables, self._words = {*found["variables"]} - {"messages"}, {*found["words"]}
        self._arguments: Mapping[str, Any] = {}
        self.source, self._names = source, dict(tokenizer.names)
        self._special, self._tokens = tokenizer.special_pattern, list(tokenizer.special)
        tokens = tokenizer.special
        self._beginnings = {token[:size] for token in tokens for size in range(1, len(token))}
        self._endings = {token[size:] for token in tokens for size in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)
        token = self._special.pattern
        self._found = re.compile(
            f"{_MARK}(?P<plain>{token})|{_MARK}|{_BREAK}|(?P<begin>{_BEGIN})|(?P<end>{_END})"
            f"|(?P<content>{_CONTENT_END})|(?P<special>{token})"
        )

    def render(self, messages: Messages, *, generation_prompt: bool = False) -> Rendered:
        """The text of a conversation, with the beginning of an assistant's turn behind it if asked.

        Raises ValueError where the template refuses it.
        """
        (found,) = self._renderings(messages, [(len(messages), generation_prompt)])
        return _required(found)

    def _renderings(
        self, messages: Messages, asked: Sequence[tuple[int, bool]]
    ) -> list[Rendered | ValueError]:
        """`render` of the first so many messages with a generation prompt or not, for each asked;
        or the ValueError of it. All together: the process answers them at once."""
        marked = self._marked([*map(turns.with_reasoning, messages)])
        answers = self._ask([(marked[:count], prompt) for count, prompt in asked])
        return [
            self._answered(answer, marked[:count])
            for answer, (count, _) in zip(answers, asked, strict=True)
        ]

    def _ask(self, asked: Sequence[tuple[Messages, bool]]) -> list[dict[str, Any]]:
        """What the process of templates answers to marked messages, with a generation prompt or
        not."""
        given = {"tools": None, "documents": None} | self._names | self._arguments
        values = [
            given | {"messages": messages, "add_generation_prompt": prompt}
            for messages, prompt in asked
        ]
        return template_process.ask(self.source, (_BEGIN, _END), values)

    def _answered(self, answer: dict[str, Any], messages: Messages) -> Rendered | ValueError:
        if "refused" in answer:
            return ValueError(f"the chat template refuses the conversation: {answer['refused']}")
        raw = answer["text"]
        for number, message in enumerate(messages, 1):
            if isinstance(parts := message.get("content"), list) and str(parts) in raw:
                return ValueError(
                    f"message {number} has a list of parts as its content, and the chat template "
                    "writes it as Python does: write a string, or use a template that goes through "
                    "parts"
                )
        return self._read(raw)

    def given(self, arguments: Mapping[str, Any]) -> "Template":
        """The template with what it takes beside messages.

        Raises ValueError for what it does not take, unless that is empty.
        """
        for name, value in arguments.items():
            if name in tokenizer_files.NAMED_TOKENS:
                raise ValueError(f"{name} is the tokenizer's: remove it from the record")
            if value and name not in self.variables:
                raise ValueError(
                    f"the record has {name!r}, which the chat template does not read: remove it, "
                    "or use a template that reads it"
                )
        other = copy.copy(self)
        other._arguments = {name: self._marked_setting(value) for name, value in arguments.items()}
        return other

    def _marked_setting(self, value: Any) -> Any:
        # A template compares words ("high") with its own; a mark inside would make them others.
        word = isinstance(value, str) and re.fullmatch(r"[\w.-]*", value)
        return value if word and not self._special.search(value) else self._marked(value)

    def _whole(self, messages: Messages) -> Rendered:
        """`render`. Raises ValueError too where the template leaves out what messages say."""
        marked = self._marked([*map(turns.with_reasoning, messages)])
        signed = turns.Signed(marked, _CONTENT_END)
        found, answer = self._ask([(marked, False), (signed.messages, False)])
        whole = _required(self._answered(found, marked))
        for key in turns.SAID:
            names = turns.names_of(key)
            having = [number for number, message in enumerate(messages) if message.get(key)]
            # Most templates that know these words take tools beside messages alone.
            if not having or not self._words.isdisjoint({*names} - {"tools", "functions"}):
                continue
            less = [{name: x for name, x in one.items() if name not in names} for one in messages]
            if self.render(less).text == whole.text:
                raise ValueError(
                    f"message {having[0] + 1}, of the role {messages[having[0]]['role']!r}, has "
                    f"{key!r}, which the chat template does not write: remove it, or use a "
                    "template that writes it"
                )
        # A template may refuse a text for its mark, which says nothing.
        unsaid = [said for said in signed.said if said.mark not in answer.get("text", said.mark)]
        together = max(1, _TOGETHER // len(whole.text or "1"))
        for first in range(0, len(unsaid), together):
            some = unsaid[first : first + together]
            # Earlier thoughts are left out on purpose, and written where the turn is the last.
            cut = self._ask([(signed.messages[: said.number + 1], False) for said in some])
            for said, earlier in zip(some, cut, strict=True):
                if not said.may_go or said.mark not in earlier.get("text", ""):
                    raise ValueError(said.refusal(messages))
        return whole

    def _read(self, raw: str) -> Rendered:
        """What the template wrote, without the marks."""
        pieces, size, at = [], 0, 0
        special, begins, learned, ends = [], [], [], []
        for found in self._found.finditer(raw):
            kept = found["plain"] or found["special"] or ""
            pieces += [raw[at : found.start()], kept]
            size += found.start() - at
            if found["special"]:
                special.append((size, size + len(kept)))
            elif found["begin"]:
                begins.append(size)
            elif found["end"] and begins:
                learned.append((begins.pop(), size))
            elif found["content"]:
                ends.append(size)
            size, at = size + len(kept), found.end()
        text = "".join([*pieces, raw[at:]])
        end = ends[0] if len(ends) == 1 else None
        return Rendered(text, tuple(special), tuple(learned), end)

    def _marked(self, value: Any) -> Any:
        """The strings of messages with marks before special tokens and beside parts of them."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, dict):
            return {
                self._special.sub(_marked_token, key): (
                    inner if key in _NO_TEXT else self._marked(inner)
                )
                for key, inner in value.items()
            }
        return [self._marked(one) for one in value] if isinstance(value, list) else value

    def _marked_text(self, text: str) -> str:
        # Spaces stay outside: a template may trim them.
        kept = text.strip()
        marked, sizes = self._special.sub(_marked_token, kept), range(1, self._longest)
        inside = len(kept) < self._longest and any(kept in token for token in self._tokens)
        if kept and (inside or any(marked[:size] in self._endings for size in sizes)):
            marked = _BREAK + marked
        if any(marked[-size:] in self._beginnings for size in sizes):
            marked += _BREAK
        begin = len(text) - len(text.lstrip())
        return text[:begin] + marked + text[begin + len(kept) :]

    def render_to_learn(self, talk: Conversation) -> Rendered:
        """The text of a whole conversation with what is learned of it. Raises ValueError."""
        if talk.arguments:
            plain = dataclasses.replace(talk, arguments={})
            return self.given(talk.arguments).render_to_learn(plain)
        whole = self._whole(talk.messages)
        learned = self._marked_turns(talk, whole)
        marked = bool(_GENERATION.search(self.source))
        if not marked:
            numbers = [
                number for number, message in enumerate(talk.messages)
                if number >= talk.first and message["role"] == ASSISTANT
                and number not in talk.unlearned
            ]  # fmt: skip
            learned = tuple(self._turns(talk.messages, numbers, whole))
        if not any(begin < end for begin, end in learned):
            raise ValueError("the chat template renders nothing of the assistant's turns")
        return dataclasses.replace(whole, learned=learned, marked=marked)

    def _marked_turns(self, talk: Conversation, whole: Rendered) -> tuple[tuple[int, int], ...]:
        """The ranges in `{% generation %}` of those turns that are learned."""
        kept = [*whole.learned]
        if kept:
            # Those of messages before one are rendered before it.
            parts = [(0, talk.first), *((number, number + 1) for number in talk.unlearned)]
            for part in parts:
                first, last = (
                    len(self.render(talk.messages[:number]).learned) if number else 0
                    for number in part
                )
                kept[first:last] = [(0, 0)] * (last - first)
        return tuple(part for part in kept if part != (0, 0))

    def _turns(
        self, messages: Messages, numbers: Sequence[int], whole: Rendered
    ) -> Iterator[tuple[int, int]]:
        """The ranges of assistants' turns in the text of the conversation."""
        going_on, last = [*messages, _NEXT], len(messages) - 1
        together = max(1, _TOGETHER // len(whole.text or "1"))
        for first in range(0, len(numbers), together):
            some = numbers[first : first + together]
            asked = [(number, True) for number in some]
            asked += [(number + (2 if number == last else 1), False) for number in some]
            asked += [(number + 1, True) for number in some]
            found, size = self._renderings(going_on, asked), len(some)
            for at, number in enumerate(some):
                before, behind, prompted = found[at::size]
                if all(message["role"] in turns.SYSTEM for message in messages[:number]):
                    before = self._before_opening(messages[:number], before, whole)
                yield self._turn(messages, number, whole, _required(before), behind, prompted)

    def _turn(
        self, messages: Messages, number: int, whole: Rendered, before: Rendered,
        behind: Rendered | ValueError, prompted: Rendered | ValueError,
    ) -> tuple[int, int]:  # fmt: skip
        """The range of an assistant's turn in the text of the conversation.

        The turn's is what the template writes behind the generation prompt, whether the
        conversation ends there or goes on.

        before: what the turn is an answer to. behind: the conversation that the turn ends, for the
        last turn the one in which a user follows. prompted: the same, with a generation prompt for
        the next answer; each a ValueError where the template refuses it.
        """
        begin, last = len(before.text), number + 1 == len(messages)
        if num_shared(whole, before) < begin:
            raise ValueError(
                f"the chat template renders what is before message {number + 1} in another way "
                "once that message follows: cut the conversation behind an earlier turn of the "
                "assistant, or use a template with {% generation %}"
            )
        begin += self._size_of_header(messages, number, before, whole)
        before = dataclasses.replace(before, text=whole.text[:begin])
        ended = messages[: number + 1], whole if last else _required(behind)
        longer = messages, whole
        if last and isinstance(behind, Rendered):  # else the template lets no user follow
            longer = [*messages, _NEXT], behind
        elif not last and messages[number + 1]["role"] == ASSISTANT:
            # What follows may begin as the template closes a conversation: a user's turn does not.
            with contextlib.suppress(ValueError):
                asked = [*messages[: number + 1], _NEXT]
                longer = asked, self.render(asked)
        end, other = self._ends_of_turn(before, number, ended, longer, prompted)
        if not last:
            end = self._end_in_other(number, other, longer, messages, whole)
        end = max(begin, end)
        if ends := closing_tokens(whole, begin, end):
            return begin, ends[-1][1]
        # The token that closes the conversation is the last turn's, if it is none that begins an
        # answer, which a template may write unasked.
        behind = next((token for token in whole.special if token[0] >= end), None)
        if last and behind and not whole.text[end : behind[0]].strip():
            end = end if before.text.endswith(whole.text[end:]) else behind[1]
        return begin, end

    def _ends_of_turn(
        self, before: Rendered, number: int, ended: tuple[Messages, Rendered],
        longer: tuple[Messages, Rendered], prompted: Rendered | ValueError,
    ) -> tuple[int, int]:  # fmt: skip
        """Where a turn ends in the text of a conversation that it ends, and of one that goes on.

        before: what the turn is an answer to.
        """
        texts = ended[1], longer[1]
        shared = num_shared(*texts)
        if shared == min(len(rendered.text) for rendered in texts):
            return shared, end_with_prompt(before, prompted, texts, shared)
        # Something closes the conversation, or what the turn holds is changed later.
        begins = self._content_ends(number, ended, longer)
        shared = num_shared(*texts, begins)
        ends = [begin + shared for begin in begins]
        if not any(
            end in (len(rendered.text), *(first for first, _ in rendered.special))
            for rendered, end in zip(texts, ends, strict=True)
        ):
            # Other words, which may begin alike: a line, or the text from a special token on.
            text, cut = texts[0].text, begins[0]
            cut += text[cut : ends[0]].rfind("\n") + 1
            for first, behind in texts[0].special:
                if begins[0] <= first < ends[0]:
                    unasked = before.text.endswith(text[first:])
                    cut = max(cut, first if unasked else behind)
            shared = cut - begins[0]
        return begins[0] + shared, begins[1] + shared

    def _end_in_other(
        self, number: int, end: int, one: tuple[Messages, Rendered], messages: Messages,
        whole: Rendered,
    ) -> int:  # fmt: skip
        """Where a turn that ends at `end` in the text of one conversation ends in another's."""
        if one[0] is messages or num_shared(one[1], whole) >= end:
            return end
        begins = self._content_ends(number, one, (messages, whole))
        return begins[1] + min(end - begins[0], num_shared(one[1], whole, begins))

    def _before_opening(
        self, system: Messages, before: Rendered | ValueError, whole: Rendered
    ) -> Rendered | ValueError:  # fmt: skip
        """What is before an answer that opens a conversation, with its header.

        before: what the template writes for an answer to nothing. It may refuse that, or write no
        header or no start.
        """
        asked = [(len(system) + 1, prompt) for prompt in (False, True)]
        plain, prompted = self._renderings([*system, _NEXT], asked)
        if isinstance(plain, ValueError) or isinstance(prompted, ValueError):
            return before
        return until_header(whole, plain, prompted) or before

    def _size_of_header(
        self, messages: Messages, number: int, before: Rendered, whole: Rendered
    ) -> int:  # fmt: skip
        """Of how many characters the header of a turn is that the text before it lacks.

        A template may write no generation prompt where the assistant spoke last.
        """
        if not number or messages[number - 1]["role"] != ASSISTANT:
            return 0
        asked = [*messages[:number], _NEXT]
        try:
            plain, prompted = (self.render(asked, generation_prompt=one) for one in (False, True))
        except ValueError:  # a template that lets no user follow
            return 0
        for size in range(len(prompted.text) - num_shared(plain, prompted), 0, -1):
            header = prompted.text[-size:]
            if whole.text.startswith(header, len(before.text)):
                return 0 if before.text.endswith(header) else size
        return 0

    def _content_ends(self, number: int, *texts: tuple[Messages, Rendered]) -> tuple[int, ...]:
        """Where the content of a message ends in the text of each conversation, or, where one has
        none of it, the name of the last tool it calls."""
        for tagged in turns.tagged(texts[0][0][number], _CONTENT_END):
            found = [
                self.render([*messages[:number], tagged, *messages[number + 1 :]])
                for messages, _ in texts
            ]
            if all(
                one.content_end is not None and one.text == whole.text
                for one, (_, whole) in zip(found, texts, strict=True)
            ):
                return tuple(one.content_end for one in found)
        raise ValueError(
            f"the end of message {number + 1} cannot be found in what the chat template renders: "
            "use a template with {% generation %}"
        )

    def end_of_turn(self) -> str:
        """The special token with which the model learns to end a turn; "" if there is none."""
        talk = [{"role": "user", "content": "1"}, {"role": ASSISTANT, "content": "2"}]
        system = [{"role": "system", "content": "0"}]
        # Some templates close a turn only where the conversation goes on.
        for messages in (talk, [*system, *talk], [*talk, *talk], [*system, *talk, *talk]):
            try:
                found = self.render_to_learn(Conversation(messages))
            except ValueError:  # the template takes other conversations only
                continue
            for learned in reversed(found.learned):
                if closing := closing_tokens(found, *learned):
                    return found.text[slice(*closing[0])]
        return ""


def _required(found: Rendered | ValueError) -> Rendered:
    if isinstance(found, ValueError):
        raise found
    return found


def _marked_token(found: re.Match) -> str:
    return _MARK + found[0]


def encode(
    tokenizer: tokenizers.Tokenizer, rendered: Rendered
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Ids, int32, and which of them are learned, uint8.

    As in the mask of `transformers`, of what a template marks it is all that touch it. Else a
    special token is where it is written, whatever blanks it takes in, and a token that begins
    before a turn is learned for more than blanks of it, and none that goes on behind it.
    """
    found = tokenizer.encode_marked(rendered.text, rendered.special)
    starts, ends = found.starts.copy(), found.ends.copy()
    if not rendered.marked and rendered.special:
        first, behind = np.array(rendered.special).T
        at = np.searchsorted(found.ends, behind)
        starts[at], ends[at] = first, behind
    weights = np.zeros(len(found.ids), np.uint8)
    for begin, end in rendered.learned:
        inside = touching = (ends > begin) & (starts < end)
        if not rendered.marked:
            inside = touching & (ends <= end)
            for at in np.flatnonzero(inside & (starts < begin)):
                inside[at] = bool(rendered.text[begin : ends[at]].strip())
            if touching.any() and not inside.any() and rendered.text[begin:end].strip():
                raise ValueError(
                    f"tokenizer {tokenizer.name} joins the assistant's turn "
                    f"{json_files.shown(rendered.text[begin:end])} and what the chat template "
                    "writes around it to one token: use a template with a special token there"
                )
        weights |= inside
    return found.ids, weights


def encode_closed(
    tokenizer: tokenizers.Tokenizer, rendered: Rendered
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """`encode`, with an end of document, which is not learned where no template wrote it."""
    ids, weights = encode(tokenizer, rendered)
    if len(ids) and ids[-1] == tokenizer.end_of_document:
        return ids, weights
    return np.append(ids, np.int32(tokenizer.end_of_document)), np.append(weights, np.uint8(0))


@functools.lru_cache(maxsize=4)
def template_of(tokenizer: tokenizers.Tokenizer) -> Template:
    """The chat template of a tokenizer. Raises ValueError if it has none."""
    return Template(tokenizer.template, tokenizer)


def ends_of_turn(tokenizer: tokenizers.Tokenizer, format: str) -> tuple[int, ...]:
    """The token with which a model of that `data.format` learns to end its turns, if it does."""
    if format not in FORMATS or not tokenizer.template:
        return ()
    end = template_of(tokenizer).end_of_turn()
    return (tokenizer.special[end],) if end else ()


def stop_tokens(tokenizer: tokenizers.Tokenizer, format: str) -> tuple[int, ...]:
    """Each ends a text that a model of that `data.format` generates."""
    return tuple(sorted({*tokenizer.stop_tokens, *ends_of_turn(tokenizer, format)}))


def read_record(record: Mapping[str, Any], template: Template) -> tuple[bytes, Rendered]:
    """The canonical bytes of a record's conversation, and its text. Raises ValueError."""
    talk = conversation(record, template.variables)
    raw = talk.canonical()
    if len(raw) > MAX_BYTES:
        raise ValueError(f"a conversation of more than {MAX_BYTES:,} bytes: write it as several")
    return raw, template.render_to_learn(talk)
