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
