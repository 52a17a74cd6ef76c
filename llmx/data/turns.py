"""What records of conversations say beside the words: repeated prompts, flags, arguments.

Public records say some things twice (a prompt, and answers that begin with it) and hold what a
template takes beside the messages. What is known here is read, or refused by its name; other keys
(`id`, `source`, scores) are of other purposes and ignored.
"""

import dataclasses
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

SYSTEM = ("system", "developer")
ANSWERING = ("assistant", "tool", "function", "ipython", "environment")
SYSTEM_KEYS = ("system", "system_prompt", "system_message")
KWARGS = "chat_template_kwargs"
# What templates take beside messages, as keys of a record.
ARGUMENTS = (
    "tools", "documents", "functions", "custom_tools", "builtin_tools", "xml_tools",
    "python_tools", "tool_choice", "parallel_tool_calls", "enable_thinking", "thinking",
    "reasoning", "reasoning_content", "reasoning_effort", "thinking_budget", "date_string",
)  # fmt: skip
# Keys of a message that say something, which a template may know or not.
SAID = (
    "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "thought",
    "tools", "functions",
)  # fmt: skip
# Names of one thing, of which `transformers` gives templates the first two, whichever is there.
REASONING = ("reasoning_content", "thinking", "reasoning")
_CALLS = ("tool_calls", "function_call")
# Of a message: whether a turn of the assistant is learned.
FLAGS = (
    "weight", "train", "trainable", "training", "loss", "loss_weight", "loss_mask", "learn",
)  # fmt: skip
# The same, where true may mean either, or only a part of the turn is meant.
_UNCLEAR = ("train_detail", "mask", "masked", "ignore")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_MEDIA_PARTS = (*_MEDIA, "image_url", "video_url", "audio_url", "input_audio", "file")
# What a caller of a template sets, and no record.
_RESERVED = (
    "messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
)  # fmt: skip

Messages = list[dict[str, Any]]


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages say the same, however their content is written."""
    one, other = with_reasoning(one), with_reasoning(other)
    keys = {"role", *SAID} - {"reasoning"}
    return all(one.get(key) == other.get(key) for key in keys) and _text(one) == _text(other)


def with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the names that templates read."""
    for key in REASONING:
        if message.get(key) is not None:
            return {"thinking": message[key], **message, "reasoning_content": message[key]}
    return dict(message)


def names_of(key: str) -> Collection[str]:
    """The names that a message may have one thing under."""
    return REASONING if key in REASONING else (key,)


def _text(message: Mapping[str, Any]) -> Any:
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            return content
        content = "".join(parts)
    return content.strip()


def all_same(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two lists of messages say the same."""
    return len(one) == len(other) and all(map(same, one, other))


def num_shared(one: Messages, other: Messages) -> int:
    """How many messages two lists begin with alike."""
    alike = itertools.takewhile(lambda two: same(*two), zip(one, other, strict=False))
    return len([*alike])


def find(part: Messages, whole: Messages) -> int | None:
    """Where messages stand among others, None where they do not."""
    size = len(part)
    return next((i for i in range(len(whole)) if all_same(part, whole[i : i + size])), None)


def begins_anew(messages: Messages) -> bool:
    """Whether messages begin with what is asked, and not with what is answered."""
    return bool(messages) and messages[0]["role"] not in ANSWERING


def joined(prompt: Messages, answer: Messages, names: tuple[str, str]) -> tuple[Messages, int]:
    """A prompt and the messages behind it, and how many are the prompt's.

    An answer may begin with the prompt, with its last turns, or with turns before it. Raises
    ValueError, with the names of both fields, where it begins with another one.
    """
    if any(begins_anew([one]) for one in prompt) and all_same(prompt, answer[: len(prompt)]):
        return [*prompt, *answer[len(prompt) :]], len(prompt)
    if not prompt or not begins_anew(answer):
        return [*prompt, *answer], len(prompt)
    for size in range(min(len(prompt), len(answer)), 0, -1):
        if all_same(prompt[-size:], answer[:size]):
            return [*prompt, *answer[size:]], len(prompt)
    if (at := find(prompt, answer)) is not None:
        return answer, at + len(prompt)
    asks = any(message["role"] == "user" for message in prompt)
    if answer[0]["role"] in SYSTEM or (asks and prompt[-1]["role"] not in ANSWERING):
        first, second = names
        raise ValueError(
            f"{first} and {second} contradict each other: {second} begins with another prompt: "
            f"write the prompt once, in {first} or in {second}"
        )
    return [*prompt, *answer], len(prompt)


def with_system(messages: Messages, record: Mapping[str, Any]) -> Messages:
    """The messages behind the system prompt that a record has as a field of its own."""
    for key in SYSTEM_KEYS:
        if not (text := record.get(key)):
            continue
        if not isinstance(text, str):
            raise ValueError(f"{key} is a {type(text).__name__}: write a string")
        if messages[0]["role"] not in SYSTEM:
            messages = [{"role": "system", "content": text}, *messages]
        elif _text(messages[0]) != text.strip():
            raise ValueError(
                f"{key} and the first message contradict each other: write the system prompt once"
            )
    return messages


def without_flags(messages: Messages) -> tuple[Messages, tuple[int, ...]]:
    """The messages as templates take them, and the numbers of those that are not to be learned."""
    kept, unlearned = [], []
    for number, message in enumerate(messages):
        where = f"message {number + 1}"
        flags = {key: message[key] for key in FLAGS if key in message}
        for key, value in flags.items():
            if value not in (0, 1):  # True and False too
                raise ValueError(
                    f"{where} has {key}={json.dumps(value)[:80]}: a turn is learned (1, true) or "
                    "not (0, false)"
                )
            if value and message["role"] != "assistant":
                raise ValueError(
                    f"{where} has {key}={json.dumps(value)} and the role {message['role']!r}: only "
                    "turns of the assistant are learned: remove the key"
                )
        _refuse_unclear(where, message)
        _refuse_media(where, message)
        reasons = [key for key in REASONING if message.get(key) is not None]
        if any(message[key] != message[reasons[0]] for key in reasons):
            raise ValueError(
                f"{where} has {' and '.join(reasons)}, which contradict each other: write the "
                "reasoning once"
            )
        if not all(flags.values()):
            unlearned.append(number)
        kept.append({key: value for key, value in message.items() if key not in FLAGS})
    return kept, tuple(unlearned)


def _refuse_unclear(where: str, record: Mapping[str, Any]) -> None:
    for key in _UNCLEAR:
        if record.get(key) is not None:
            raise ValueError(
                f"{where} has {key!r}, which is not read: remove it, and write weight 0 into each "
                "message of the assistant that is not to be learned"
            )


def _refuse_media(where: str, record: Mapping[str, Any]) -> None:
    found = [key for key in _MEDIA if record.get(key)]
    if isinstance(parts := record.get("content"), list):
        kinds = (part.get("type") for part in parts if isinstance(part, dict))
        found += [kind for kind in kinds if kind in _MEDIA_PARTS]
    if found:
        raise ValueError(f"{where} has {found[0]!r}, and text alone is read: remove the record")


def arguments(record: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """What a record gives to a template beside messages.

    known: names that the template takes. Raises ValueError for what is known and cannot be used.
    """
    _refuse_media("the record", record)
    _refuse_unclear("the record", record)
    for key in FLAGS:
        # Other numbers and words are weights in these two alone, and scores or names elsewhere.
        weighs = key in ("weight", "loss_weight")
        if record.get(key) == 0 or (weighs and record.get(key) not in (None, 1)):
            raise ValueError(
                f"{key}={json.dumps(record[key])[:80]} of a record is not read: remove it; of a "
                "message it says whether the turn is learned"
            )
    if record.get("history") and "history" not in known:
        raise ValueError(
            "history holds earlier turns and is not read: write them as messages before the prompt"
        )
    if isinstance(record.get("label"), bool):
        raise ValueError(
            "label says whether the answer is good, and such records are not read: keep the good "
            "ones, without the key, or write pairs of chosen and rejected answers"
        )
    read = {"prompt", "completion", "chosen", "rejected", "content", "role"}
    read |= {KWARGS, "label", "weight", *_RESERVED, *SYSTEM_KEYS}
    found = {
        key: value for key, value in record.items()
        if value is not None and key not in read and (key in ARGUMENTS or key in known)
    }  # fmt: skip
    further = _parsed(record.get(KWARGS), KWARGS, dict) or {}
    for key, value in further.items():
        if key in _RESERVED:
            raise ValueError(f"{KWARGS} has {key!r}, which llmx sets itself: remove it")
        if key in found and found[key] != value:
            raise ValueError(f"{key} and {KWARGS} contradict each other: write {key} once")
        found[key] = value
    for key in ("tools", "documents"):
        if found.get(key) is not None:
            found[key] = _parsed(found[key], key, list)
    if not all(isinstance(tool, dict) for tool in found.get("tools") or ()):
        raise ValueError("tools holds what is no object: write a list of JSON schemas")
    return found


def _parsed(value: Any, key: str, kind: type) -> Any:
    """A value that may be written as JSON in a string, as tables without nested columns do."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{key} is a string that is no JSON ({error})") from error
    if value is not None and not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise ValueError(f"{key} is a {type(value).__name__}: write {wanted}")
    return value


@dataclasses.dataclass(frozen=True)
class Said:
    """A mark behind something that a message says."""

    mark: str
    number: int  # of the message
    key: str  # that it says it under

    @property
    def may_go(self) -> bool:
        """Whether templates leave it out on purpose once other messages follow."""
        return self.key not in _CALLS

    def refusal(self, messages: Messages) -> str:
        """What is wrong where a template does not write it."""
        message, remedy = messages[self.number], "remove it"
        what = f"its {next(key for key in names_of(self.key) if key in message)}"
        if isinstance(message.get(self.key), list) and self.key == "content":
            what, remedy = "all of its list of parts", "write a string as its content"
        elif self.key == "content":
            calls = [key for key in _CALLS if key in message]
            what += f" beside its {calls[0]}" if calls else ""
            remedy = "remove one of the two" if calls else "remove the message"
        return (
            f"message {self.number + 1}, of the role {message['role']!r}: the chat template does "
            f"not write {what}: {remedy}, or use a template that writes it"
        )


class Signed:
    """Messages with marks behind all that they say: texts, thoughts, names of tools they call.

    Each mark is another, and begins with the one that is given.
    """

    def __init__(self, messages: Messages, mark: str):
        self._mark, self.said = mark, []
        self.messages = [self._message(number, one) for number, one in enumerate(messages)]

    def _message(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        signed = {"content": self._content(number, message.get("content"))}
        for key in (key for key in (*REASONING, "thought") if key in message):
            same = next((name for name in names_of(key) if name in signed), None)
            signed[key] = signed[same] if same else self._text(message[key], number, key)
        for key in (key for key in _CALLS if key in message):
            calls = message[key]
            several = isinstance(calls, list)
            made = [self._call(call, number, key) for call in (calls if several else [calls])]
            signed[key] = made if several else made[0]
        return message | {key: value for key, value in signed.items() if key in message}

    def _content(self, number: int, content: Any) -> Any:
        if not isinstance(content, list):
            return self._text(content, number, "content")
        return [
            {**part, "text": self._text(part["text"], number, "content")}
            if isinstance(part, dict) and "text" in part
            else self._text(part, number, "content")
            for part in content
        ]

    def _call(self, call: Any, number: int, key: str) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(inner := call.get("function"), dict):
            return {**call, "function": self._call(inner, number, key)}
        return call | {"name": self._text(call["name"], number, key)} if "name" in call else call

    def _text(self, text: Any, number: int, key: str) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        self.said.append(Said(f"{self._mark}{len(self.said):09d}", number, key))
        return _tagged(text, self.said[-1].mark)


def tagged(message: dict[str, Any], mark: str) -> Iterator[dict[str, Any]]:
    """A message with a mark where something ends that templates write as it is.

    A template may ask whether there is content: the mark is put into an empty one last.
    """
    content = message.get("content")
    if content:
        yield {**message, "content": _tagged(content, mark)}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls and isinstance(calls[-1], dict):
        *before, call = calls
        yield {**message, "tool_calls": [*before, _named_call(call, mark)]}
    if isinstance(call := message.get("function_call"), dict):
        yield {**message, "function_call": _named_call(call, mark)}
    if content == "":
        yield {**message, "content": _tagged(content, mark)}


def _named_call(call: dict[str, Any], mark: str) -> dict[str, Any]:
    """The call of a tool with a mark behind the tool's name."""
    if isinstance(inner := call.get("function"), dict):
        return {**call, "function": _named_call(inner, mark)}
    return {**call, "name": _tagged(call.get("name"), mark)}


def _tagged(content: Any, mark: str) -> Any:
    """The content of a message with a mark where its text ends, blanks apart."""
    if isinstance(content, str):
        kept = content.rstrip()
        return kept + mark + content[len(kept) :]
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        return [*content[:-1], {**content[-1], "text": _tagged(content[-1].get("text"), mark)}]
    return content
