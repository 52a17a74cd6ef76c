"""What a chat template makes of a conversation: text, its special tokens, what is learned of it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the character ranges of special tokens and of what is learned."""

    text: str
    special: tuple[tuple[int, int], ...]
    learned: tuple[tuple[int, int], ...] = ()
    # Where the content of one message ended, if that was asked for and it is there once.
    content_end: int | None = None
    marked: bool = False  # whether the template itself says what is learned


def num_shared(one: Rendered, two: Rendered, begins: tuple[int, int] = (0, 0)) -> int:
    """Of how many characters from `begins` on two texts are the same, special tokens as a whole."""
    both = list(zip((one, two), begins, strict=True))
    first, second = (rendered.text[begin:] for rendered, begin in both)
    tokens = [
        {(at - begin, end - begin) for at, end in rendered.special if at >= begin}
        for rendered, begin in both
    ]
    low, high = 0, min(len(first), len(second))
    while low < high:  # the first `low` are the same, and those behind `high` are not
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    cut = [at for at, end in tokens[0] if at < low < end]
    return min([low, *cut, *(at for at, _ in tokens[0] ^ tokens[1] if at < low)])


def closing_tokens(rendered: Rendered, begin: int, end: int) -> list[tuple[int, int]]:
    """The special tokens at the end of a range, with nothing but blanks between and behind them."""
    found = []
    for first, behind in reversed(rendered.special):
        if first >= begin and behind <= end:
            if rendered.text[behind:end].strip():
                break
            found, end = [(first, behind), *found], first
    return found


def end_with_prompt(
    before: Rendered, prompted: Rendered | ValueError, texts: tuple[Rendered, Rendered], end: int
) -> int:  # fmt: skip
    """Where a turn ends in the second of `texts`, where the conversation goes on.

    end: where it does in the first, where the conversation ends. A template may close a turn only
    where something follows, a generation prompt too.
    """
    if closing_tokens(texts[0], len(before.text), end) or isinstance(prompted, ValueError):
        return end
    size = len(prompted.text)
    closed = any(first >= end for first, _ in prompted.special)
    header = before.text.endswith(prompted.text[end:])
    return size if closed and not header and num_shared(prompted, texts[1]) == size else end


def until_header(whole: Rendered, plain: Rendered, prompted: Rendered) -> Rendered | None:
    """A text that an answer opens up to the end of the answer's header, None if it has none.

    plain, prompted: a text that a user opens, without and with the header of an answer behind. The
    header is where both openings differ, whatever stands before.
    """
    differ = num_shared(whole, plain)
    for size in range(len(prompted.text) - num_shared(plain, prompted), 0, -1):
        begin = whole.text.find(prompted.text[-size:], max(0, differ - size), differ + size)
        if begin >= 0:
            end = begin + size
            return Rendered(whole.text[:end], tuple(t for t in whole.special if t[1] <= end))
    return None
