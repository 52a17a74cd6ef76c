"""Who may see whom in attention, and what is done to the scores: what every kernel is told.

Letters: B batch, T query positions, S key/value positions.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Who may see whom: the same document, not the future, and within the window.

    Positions count from 0 within a document, so documents packed into a row are told apart by
    segment.

    `ahead` is a promise by which kernels skip blocks without looking: queries and keys are rows of
    one text in order, within a document positions count up by one along it, and the first query
    lies `ahead` rows after the first key. Then rows stand for positions, which may be None.
    None: no promise.
    `one_document` promises that what precedes a token in its row is of its document, except for
    tokens whose output nobody counts (a row's padding): then segments need no look either.
    """

    segments_BT: Int[Array, "B T"]
    positions_BT: Int[Array, "B T"] | None
    key_segments_BS: Int[Array, "B S"]
    key_positions_BS: Int[Array, "B S"] | None
    ahead: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    one_document: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @property
    def places(self) -> tuple[Array, Array]:
        """Where queries and keys stand, as their differences count: [1 or B, T], [1 or B, S]."""
        if self.ahead is None:
            return self.positions_BT, self.key_positions_BS
        rows_1T = self.ahead + jnp.arange(self.segments_BT.shape[1])[None]
        return rows_1T, jnp.arange(self.num_keys)[None]

    @property
    def num_keys(self) -> int:
        return self.key_segments_BS.shape[1]

    def visible(self, window: int) -> Array:
        """bool[B, T, S]; `window` positions back including itself, 0 = all."""
        return visible(self.segments_BT, self.key_segments_BS, *self.places, window)

    def sees_all(self, window: int) -> bool:
        """Whether neither order nor window hides any key from any query, as far as promised."""
        if self.ahead is None:
            return False
        last = self.ahead + self.segments_BT.shape[1] - 1
        return self.ahead >= self.num_keys - 1 and (not window or last < window)


def visible(segments_BT, key_segments_BS, places_BT, key_places_BS, window: int) -> Array:
    """bool[B, T, S]: the same document, not the future, and within the window (0 = all)."""
    back_BTS = places_BT[:, :, None] - key_places_BS[:, None, :]
    visible_BTS = segments_BT[:, :, None] == key_segments_BS[:, None, :]
    visible_BTS &= back_BTS >= 0
    return visible_BTS & (back_BTS < window) if window else visible_BTS


@dataclasses.dataclass(frozen=True)
class Scores:
    """What is done to q.k before the softmax, and how far back it may look."""

    scale: float
    softcap: float = 0.0  # c tanh(score / c), 0 = off
    window: int = 0  # 0 = no limit
