"""What a student's attention learns from a teacher's: how it relates the tokens of a document.

For chosen pairs of layers, KL(teacher || student) of distributions over the keys that a query sees:

    qq, kk, vv   softmax(A A^T / sqrt(U)), A the queries, keys or values of all heads together, cut
                 into R relation heads of U numbers (MiniLMv2, arXiv 2012.15828): widths, numbers of
                 heads and of key/value heads may differ between the models
    qk           the map of attention itself, head by head (MiniLM, arXiv 2002.10957), with each
                 model's own scale and soft cap; key/value heads repeat as in attention. Both models
                 have as many heads

Queries, keys and values are those that attention receives: with biases, after norms and rotation. A
query sees the keys of its document that are not in the future and are within the windows of both
layers. Sinks have no part.

Scores of all queries never exist at once: a scan goes over chunks of queries, and the backward pass
computes the scores of a chunk again.

Letters: B batch, T query positions, S key positions, C queries of a chunk, N heads, K key/value
heads, H head size, R relation heads, U numbers of one, P pairs of layers.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llmx import sharding
from llmx.model import families, hidden_states
from llmx.model.attention import attend
from llmx.model.attention.masks import Mask, Scores, visible
from llmx.runtime import bounds

MAP = "qk"
NAMES = ("qq", "kk", "vv", MAP)
# What layers hand out, by letter, and its logical axes.
ARRAYS = {"q": "queries", "k": "keys", "v": "values"}
AXES = {"queries": attend.QUERY, "keys": attend.KEY, "values": attend.KEY}
ROWS = 256  # queries of a chunk at most
FLOOR = -1e38  # below every score
NO_QUERY = -(2**31)  # segment of padding


@dataclasses.dataclass(frozen=True)
class Relations:
    """Which relations are learned, between which layers."""

    names: tuple[str, ...]
    heads: int  # R, of relations that are no map
    # (layer of the student, of the teacher, how many positions back both see, 0 = all)
    pairs: tuple[tuple[int, int, int], ...]
    maps: tuple[Scores, Scores]  # how q.k becomes a score in the student, and in the teacher

    @property
    def arrays(self) -> tuple[str, ...]:
        """What of layers is needed, some of `ARRAYS`."""
        letters = "".join(self.names)
        return tuple(name for letter, name in ARRAYS.items() if letter in letters)

    @property
    def of_teacher(self) -> tuple[int, ...]:
        """The teacher's layer of each pair."""
        return tuple(layer for _, layer, _ in self.pairs)

    def losses(
        self, student: Mapping[str, Array], teacher: Mapping[str, Array], mask: Mask, *,
        place: sharding.Placement,
    ) -> Float[Array, "B T"]:  # fmt: skip
        """Of each token as a query, the mean of the divergences over pairs, relations and heads, in
        nats, fp32.

        Args:
          student: some of `ARRAYS` of all its layers, [L, B, T, N or K, H].
          teacher: the same of the pairs, [B, T, P, N or K, H].

        Gathers queries, keys and values over the mesh axes that split positions, and those that are
        whole along heads are cut over `tensor`; sums over `tensor`.
        """
        tokens, split = place.activation(attend.QUERY[:2]), _Split.of(place)
        specs = {name: place.activation(AXES[name]) for name in self.arrays}
        region = functools.partial(
            place.manual, in_specs=(specs, specs, tokens, tokens), out_specs=tokens
        )
        total_BT = jnp.zeros((), jnp.float32)
        for number, (layer, _, window) in enumerate(self.pairs):
            both = (
                {name: student[name][layer] for name in self.arrays},
                {name: teacher[name][:, :, number] for name in self.arrays},
            )
            local = functools.partial(self._local, split, self._num_heads(both), window)
            total_BT += region(local)(*both, mask.segments_BT, mask.positions_BT)
        return total_BT / len(self.pairs)

    def _num_heads(self, both: Sequence[Mapping[str, Array]]) -> dict[str, tuple[int, list[int]]]:
        """By relation: its heads, and how often each model's key/value heads repeat."""
        found = dict.fromkeys(self.names, (self.heads, [1, 1]))
        if MAP in found:
            sizes = [[one[name].shape[2] for name in ("queries", "keys")] for one in both]
            found[MAP] = sizes[0][0], [queries // keys for queries, keys in sizes]
        return found

    def _local(self, split, num_heads, window, student, teacher, segments_BT, positions_BT):
        """`losses` of one pair on one device, of its queries and its relation heads."""
        mask = Mask(segments_BT, positions_BT, split.all(segments_BT), split.all(positions_BT))
        total_BT = jnp.zeros(segments_BT.shape, jnp.float32)
        for relation in self.names:
            (number, repeats), (first, second) = num_heads[relation], map(ARRAYS.get, relation)
            sides = []
            for arrays, times, of_map in zip((student, teacher), repeats, self.maps, strict=True):
                query_BTRU = split.heads_of(first, arrays[first], number)
                key_BSKH = split.all(arrays[second])
                if times > 1:
                    key_BSKH = jnp.repeat(key_BSKH, times, axis=2)
                key_BSRU = split.heads_of(second, key_BSKH, number)
                scores = Scores(1 / math.sqrt(query_BTRU.shape[-1]))
                sides.append((query_BTRU, key_BSRU, of_map if relation == MAP else scores))
            total_BT += divergences(*sides, mask, window) / number
        total_BT /= len(self.names)
        return jax.lax.psum(total_BT, split.heads) if split.heads else total_BT


@dataclasses.dataclass(frozen=True)
class _Split:
    """What a device has: the mesh axes that split positions and heads."""

    positions: tuple[str, ...]
    heads: tuple[str, ...]
    ways: int  # devices along `heads`
    whole: tuple[str, ...]  # of `ARRAYS`, those that devices have of all heads

    @classmethod
    def of(cls, place: sharding.Placement) -> "_Split":
        positions, heads = map(sharding.mesh_axes, place.activation(attend.QUERY)[1:3])
        of = {name: sharding.mesh_axes(place.activation(axes)[2]) for name, axes in AXES.items()}
        whole = tuple(name for name, axes in of.items() if axes != heads)
        return cls(positions, heads, place.size(heads), whole)

    def all(self, array: Array) -> Array:
        """[B, T / ways, ...] of all positions."""
        if not self.positions:
            return array
        return jax.lax.all_gather(array, self.positions, axis=1, tiled=True)

    def heads_of(self, name: str, array_BTNH: Array, number: int) -> Array:
        """Numbers of heads as `number` relation heads, those of this device."""
        mine = number // self.ways
        here = number if name in self.whole else mine
        array_BTRU = array_BTNH.reshape(*array_BTNH.shape[:2], here, -1)
        if here == mine:
            return array_BTRU
        first = jax.lax.axis_index(self.heads) * mine
        return jax.lax.dynamic_slice_in_dim(array_BTRU, first, mine, axis=2)


def divergences(
    student: tuple[Array, Array, Scores], teacher: tuple[Array, Array, Scores], mask: Mask,
    window: int,
) -> Float[Array, "B T"]:  # fmt: skip
    """Of each query the sum over heads of KL(teacher || student), on one device, in nats, fp32.

    `student` and `teacher`: queries [B, T, R, U], keys [B, S, R, U] and how their products become
    scores. The gradient goes to the student's.
    """
    T = mask.segments_BT.shape[1]
    num = -(-T // ROWS)
    rows = -(-T // num)

    def chunks(array, fill=0):
        pad = [(0, 0), (0, num * rows - T), *[(0, 0)] * (array.ndim - 2)]
        array = jnp.pad(array, pad, constant_values=fill)
        return jnp.moveaxis(array.reshape(array.shape[0], num, rows, *array.shape[2:]), 1, 0)

    # In fp32 so that the gradients of chunks are added up in it; products are in the queries' dtype
    keys = [key_BSRU.astype(jnp.float32) for _, key_BSRU, _ in (student, teacher)]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(keys, arrays):
        queries, segments_BC, positions_BC = arrays
        seen_BCS = visible(
            segments_BC, mask.key_segments_BS, positions_BC, mask.key_positions_BS, window
        )
        seen_B1CS, logs = seen_BCS[:, None], []
        for query_BCRU, key_BSRU, (_, _, scores) in zip(
            queries, keys, (student, teacher), strict=True
        ):
            products_BRCS = jnp.einsum(
                "BCRU,BSRU->BRCS", query_BCRU, key_BSRU.astype(query_BCRU.dtype),
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            scores_BRCS = jnp.where(seen_B1CS, scores.capped(products_BRCS), FLOOR)
            logs.append(jax.nn.log_softmax(scores_BRCS, axis=-1))
        log_q_BRCS, log_p_BRCS = logs
        terms_BRCS = jnp.exp(log_p_BRCS) * (log_p_BRCS - log_q_BRCS)
        return jnp.sum(jnp.where(seen_B1CS, terms_BRCS, 0), axis=(1, 3))

    queries = [chunks(query_BTRU) for query_BTRU, _, _ in (student, teacher)]
    rows_of = queries, chunks(mask.segments_BT, NO_QUERY), chunks(mask.positions_BT)
    found = jax.lax.map(functools.partial(of_chunk, keys), rows_of)
    return jnp.moveaxis(found, 0, 1).reshape(found.shape[1], -1)[:, :T]


def of(
    names: Sequence[str], heads: int, layers: Sequence[int], student: families.ModelConfig,
    teacher: families.ModelConfig,
) -> Relations:  # fmt: skip
    """The relations of a student and a teacher, which fit them: see `problems`.

    `heads`: 0 = as many as the student's. `layers`: as of `hidden_states.pairs_of`, but that () is
    the last by the last.
    """
    layers = tuple(layers) or (*[-1] * (student.num_layers - 1), teacher.num_layers - 1)
    pairs = hidden_states.pairs_of(layers, student.num_layers, teacher.num_layers)
    windows = [_windows(model) for model in (student, teacher)]

    def window(own: int, other: int) -> int:
        return min(filter(None, (windows[0][own], windows[1][other])), default=0)

    maps = (Scores(model.score_scale, model.attention_softcap) for model in (student, teacher))
    return Relations(
        tuple(names), heads or student.num_heads,
        tuple((own, other, window(own, other)) for own, other in pairs), tuple(maps),
    )  # fmt: skip


def _windows(model: families.ModelConfig) -> list[int]:
    """Of each layer, 0 = all."""
    return [model.window if families.is_local(kind) else 0 for kind in model.layer_kinds]


def problems_of_names(names: Sequence[str]) -> Iterator[str]:
    """What is wrong with a list of relations."""
    for name in names:
        if name not in NAMES:
            yield f"{name!r} is unknown: {bounds.use_one_of(name, NAMES)}"
    if len(set(names)) < len(names):
        yield "names a relation twice: name each once"
    if not names:
        yield f"names no relation: give some of {', '.join(NAMES)}"


def problems(
    names: Sequence[str], heads: int, tensor: int, student: families.ModelConfig,
    teacher: families.ModelConfig,
) -> Iterator[str]:  # fmt: skip
    """Why relations of these names, in this number of relation heads (0 = as many as the student's
    heads) over `tensor` devices, cannot be compared; of each the key, the value and the remedy."""
    if MAP in names and student.num_heads != teacher.num_heads:
        yield (
            f"attention_relations={tuple(names)}: {MAP!r} compares head by head, and the student "
            f"has {student.num_heads} heads, the teacher {teacher.num_heads}: leave {MAP!r} out, "
            f"or set model.num_heads={teacher.num_heads}"
        )
    letters = {letter for name in NAMES if name in names and name != MAP for letter in name}
    if not letters:
        return
    number = heads or student.num_heads
    sizes = {
        f"the {ARRAYS[letter]} of the {who}": _numbers(model, letter)
        for who, model in (("student", student), ("teacher", teacher)) for letter in sorted(letters)
    }  # fmt: skip
    wrong = next((what for what, size in sizes.items() if size % number), "")
    if not wrong and number % tensor == 0:
        return
    shared = math.gcd(*sizes.values())
    good = [str(n) for n in bounds.divisors(shared, shared) if n % tensor == 0]
    yield (
        f"attention_heads={heads}" + (f" ({number}, as the student has)" if not heads else "")
        + (f": {wrong} have {sizes[wrong]} numbers, which {number} does not divide" if wrong
           else f": mesh.tensor={tensor} splits {number} relation heads, and does not divide them")
        + (f"; use one of {', '.join(good)}" if good
           else f"; no number divides {shared} and is a multiple of {tensor}: use a smaller tensor")
    )  # fmt: skip


def _numbers(model: families.ModelConfig, letter: str) -> int:
    """Of all heads of queries, keys or values of a token."""
    heads = model.num_heads if letter == "q" else model.num_kv_heads
    return heads * (model.value_width if letter == "v" else model.head_dim)
