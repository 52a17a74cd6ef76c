"""Which keys each query sees, and what is done to the scores: the input of every kernel.

Letters: B batch, T query positions, S key/value positions.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """Which keys each query sees: of the same document, not in the future, within the window.

    Positions count from 0 within a document. Documents packed into a row have different segments.

    `ahead`, if not None, promises that queries and keys are rows of one text in order, positions
    count up by one along it within a document, and the first query lies `ahead` rows after the
    first key. Rows then stand for positions, which may be None, and kernels skip blocks unread.
    `one_document` promises that whatever precedes a token in its row is of its document, except for
    tokens whose output is not used (a row's padding): then segments need not be read either.
    """

    segments_BT: Int[Array, "B T"]
    positions_BT: Int[Array, "B T"] | None
    key_segments_BS: Int[Array, "B S"]
    key_positions_BS: Int[Array, "B S"] | None
    ahead: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    one_document: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @property
    def positions(self) -> tuple[Array, Array]:
        """Of queries and keys, up to a common offset: [1 or B, T], [1 or B, S]."""
        if self.ahead is None:
            return self.positions_BT, self.key_positions_BS
        rows_1T = self.ahead + jnp.arange(self.segments_BT.shape[1])[None]
        return rows_1T, jnp.arange(self.num_keys)[None]

    @property
    def num_keys(self) -> int:
        return self.key_segments_BS.shape[1]

    def visible(self, window: int) -> Array:
        """bool[B, T, S]; `window` positions back including itself, 0 = all."""
        return visible(self.segments_BT, self.key_segments_BS, *self.positions, window)

    def sees_all(self, window: int) -> bool:
        """Whether the promise says that each query sees every key of its document."""
        if self.ahead is None:
            return False
        last = self.ahead + self.segments_BT.shape[1] - 1
        return self.ahead >= self.num_keys - 1 and (not window or last < window)


def visible(segments_BT, key_segments_BS, positions_BT, key_positions_BS, window: int) -> Array:
    """bool[B, T, S]: the same document, not the future, and within the window (0 = all)."""
    back_BTS = positions_BT[:, :, None] - key_positions_BS[:, None, :]
    visible_BTS = (segments_BT[:, :, None] == key_segments_BS[:, None, :]) & (back_BTS >= 0)
    return visible_BTS & (back_BTS < window) if window else visible_BTS


@dataclasses.dataclass(frozen=True)
class Scores:
    """How q.k becomes the input of the softmax."""

    scale: float
    softcap: float = 0.0  # c tanh(score / c), 0 = off
    window: int = 0  # positions back including itself, 0 = all

    def capped(self, products: Array) -> Array:
        """Scores of products q.k, fp32, of any shape."""
        scores = products * self.scale
        return self.softcap * jnp.tanh(scores / self.softcap) if self.softcap else scores
