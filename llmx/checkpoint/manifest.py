"""The JSON document of a checkpoint: shape, dtype and checksum of every leaf, the layer
permutation, and the `meta` of the caller.

It has a checksum of its own and is read before any array, to compare with what the caller wants.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from llmx.checkpoint import checksums
from llmx.data import json_files, transient
from llmx.model.hidden_states import PROJECTION
from llmx.pipeline.permutation import EMPTY, IDENTITY, LayerPermutation
from llmx.sharding import trees

# 2: the layers are permuted. Other checkpoints are written as 1, which older programs read too.
FORMAT = 2
NUMBERS = (bool, int, float)  # leaves that are written into the document
# Leaves that are read in parts where they are too large for one machine: in files, their chunks
# have at most so many bytes.
IN_PARTS, PART_BYTES = ("extra/tables/",), 1 << 20

# State leaves that were renamed: (regular expression on a saved leaf name, its replacement), oldest
# first. Append only: a document states how many rows existed when it was written, and only later
# rows are applied to it. Arrays stay on disk under the names of their save.
RENAMED: tuple[tuple[str, str], ...] = (
    (r"^stale/flight/kept/", "in_flight/buffers/saved/"),
    (r"^stale/flight/", "in_flight/buffers/"),
    (r"^stale/", "in_flight/"),
    (r"^sync/kept/", "sync/residuals/"),
    (r"^sync/settled_at$", "sync/freeze_step"),
    (r"^sync/taken$", "sync/num_steps"),
    (r"^sync/updates$", "sync/num_updates"),
)
# Trained beside a model, and not a part of it: who reads the model does not want them.
BESIDE_MODEL = tuple(f"{tree}/{PROJECTION}/" for tree in ("params", "ema"))
# Scalars that the state of every strategy once had: saved ones that a strategy does not have are
# ignored.
UNKEPT = {f"sync/{n}" for n in ("freeze_step", "num_steps", "num_updates", "rates", "variance")}


class Corrupt(Exception):
    """A checkpoint cannot be read, or what was read is not what was written."""


class Unreadable(Exception):
    """A checkpoint may be good, but this process is not permitted to read it."""


class Unanswered(Unreadable):
    """A checkpoint may be good, but a disk or a store failed while it was read."""


class Mismatch(Exception):
    """A checkpoint is sound but belongs to another structure, or to another kind of run."""


@dataclasses.dataclass(frozen=True)
class Document:
    """The document of one checkpoint."""

    step: int  # steps taken
    leaves: dict[str, dict]  # by current path name: type, and value or shape, dtype and checksum
    meta: dict  # what the caller of the save added
    order: LayerPermutation = IDENTITY  # in which arrays over layers are stored
    # {current name: name on disk} of the leaves that `RENAMED` has renamed
    saved_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def holds(self, prefix: str) -> bool:
        """Whether there is a leaf `prefix`, or any under it."""
        return prefix in self.leaves or any(name.startswith(f"{prefix}/") for name in self.leaves)

    def fits(
        self, abstract: Any, *, prefix: str, order: LayerPermutation | None = None
    ) -> bool:  # fmt: skip
        """Whether the leaves under `prefix` are those of `abstract`, whose layers are in `order`;
        None = in this permutation."""
        return not self._compared(abstract, prefix, self.order if order is None else order, ())[1]

    def shapes(self, prefix: str) -> dict[str, list[int]]:
        """The shapes of the arrays under `prefix`, by path name."""
        arrays = {name: leaf for name, leaf in self.leaves.items() if leaf["type"] == "array"}
        return {n: leaf["shape"] for n, leaf in arrays.items() if n.startswith(f"{prefix}/")}

    def in_saved_dtypes(self, abstract: Any, *, prefix: str) -> Any:
        """`abstract`, each array in the dtype that it was saved in."""

        def one(name, leaf):
            saved = self.leaves.get(name, {"type": "nothing"})
            if isinstance(leaf, NUMBERS) or saved["type"] != "array":
                return leaf
            return jax.ShapeDtypeStruct(leaf.shape, saved["dtype"], sharding=leaf.sharding)

        leaves = [one(*item) for item in _named(abstract, prefix).items()]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def wanted(
        self, abstract: Any, *, prefix: str, order: LayerPermutation,
        ignored: tuple[str, ...] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """{name: abstract array} of the arrays to read for `abstract`, with its layers in `order`.

        Saved leaves under `ignored` may be missing in `abstract`. Raises Mismatch, naming the
        leaves, if the checkpoint differs; shapes are compared in the model's order of layers.
        """
        arrays, differences = self._compared(abstract, prefix, order, ignored)
        if not differences:
            return arrays
        more = [f"and {len(differences) - 8} more"] if len(differences) > 8 else []
        shown = "\n".join(f"  {text}" for text in [*differences[:8], *more])
        raise Mismatch(
            f"checkpoint {self.step} holds another structure:\n{shown}\nuse the configuration that "
            "it was saved with (its meta has it), another directory, or, if an earlier version "
            "saved it, a new run that begins with its parameters (start_from); the checkpoint is "
            "left as it is"
        )

    def assemble(self, abstract: Any, arrays: Mapping[str, jax.Array], *, prefix: str) -> Any:
        """`abstract` filled with `arrays`, PRNG keys as integers, and this document's numbers."""
        leaves = []
        for name, leaf in _named(abstract, prefix).items():
            if isinstance(leaf, NUMBERS):
                leaves.append(self.leaves[name]["value"])
            else:
                leaves.append(_wrap_key(arrays[name], leaf) if is_key(leaf) else arrays[name])
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def sealed(self, sums: Mapping[str, int]) -> dict:
        """The JSON to write; `sums`: the checksums of the arrays."""
        leaves = self.leaves | {n: self.leaves[n] | {"checksum": s} for n, s in sums.items()}
        document = {"format": 1, "step": self.step, "leaves": leaves, "meta": self.meta}
        document["renamed"] = len(RENAMED)
        if not self.order.is_identity:
            document |= {"format": 2, "order": list(self.order.slots)}
        return checksums.seal(document)

    def _compared(
        self, abstract: Any, prefix: str, order: LayerPermutation, ignored: tuple[str, ...]
    ) -> tuple[dict[str, Any], list[str]]:
        """{name: abstract array}, and the differences as texts."""
        wanted = _named(abstract, prefix)
        differences = [
            f"{name}: saved, not wanted"
            for name in self.leaves
            if f"{name}/".startswith(f"{prefix}/" if prefix else "")
            and name not in wanted
            and name not in UNKEPT
            and not name.startswith(BESIDE_MODEL)
            and not f"{name}/".startswith(tuple(f"{path}/" for path in ignored))
        ]
        arrays: dict[str, Any] = {}
        for name, leaf in wanted.items():
            number = isinstance(leaf, NUMBERS)
            want = type(leaf).__name__ if number else _text(name, leaf.dtype, leaf.shape, order)
            saved = self.leaves.get(name, {"type": "nothing"})
            have = saved["type"]
            if have == "array":
                have = _text(name, saved["dtype"], saved["shape"], self.order)
            if want != have:
                differences.append(f"{name}: saved {have}, wanted {want}")
            elif not number:
                arrays[name] = leaf
        return arrays, differences


def describe(
    step: int, state: Any, meta: Mapping, order: LayerPermutation
) -> tuple[dict, Document]:
    """The arrays to write by path name, PRNG keys as integers, and the document, no checksums yet.

    Raises ValueError for a leaf or a meta that cannot be saved.
    """
    arrays: dict[str, jax.Array] = {}
    leaves: dict[str, dict] = {}
    for name, leaf in trees.named(state).items():
        if isinstance(leaf, NUMBERS):
            leaves[name] = {"type": type(leaf).__name__, "value": leaf}
            continue
        if not isinstance(leaf, jax.Array):
            raise ValueError(
                f"state leaf {name!r} is a {type(leaf).__name__}, which a checkpoint cannot hold: "
                "use a jax.Array or a Python bool, int or float"
            )
        if leaf.is_deleted():
            remedy = "save the state that the step returned"
            raise ValueError(f"state leaf {name!r} was donated to a later step: {remedy}")
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            problem = f"state leaf {name!r} lives in one process of {jax.process_count()}"
            raise ValueError(f"{problem}: give it a NamedSharding over the whole mesh")
        if leaf.size == 0:
            raise ValueError(f"state leaf {name!r} of shape {leaf.shape} is empty: leave it out")
        leaves[name] = {"type": "array", "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        arrays[name] = _key_data(leaf) if is_key(leaf) else leaf
    document = Document(step, leaves, dict(meta), order)
    try:
        document.sealed({})
    except TypeError as error:
        problem = f"checkpoint meta must be JSON: {error}; use numbers, strings, lists and dicts"
        raise ValueError(problem) from error
    trees.nest(arrays)
    return arrays, document


def read(path: Any) -> Document:
    """The document in the file `path`, under the current leaf names.

    Raises Corrupt, Mismatch if the format is newer than this program, or Unreadable.
    """
    try:
        sealed = json.loads(path.read_text())
    except PermissionError as error:
        raise Unreadable(f"its meta cannot be read ({error})") from error
    except OSError as error:
        if transient.is_transient(error):
            raise Unanswered(f"its meta cannot be read ({error})") from error
        raise Corrupt(f"its meta cannot be read ({type(error).__name__}: {error})") from error
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"its meta cannot be read ({type(error).__name__}: {error})") from error
    return parse(sealed, str(path))


def parse(sealed: Any, path: str) -> Document:
    """The document that `Document.sealed` made, read back from the file `path`.

    Raises Corrupt, or Mismatch if the format is newer than this program.
    """
    try:
        if not checksums.is_intact(sealed):
            raise Corrupt("its meta does not match its own checksum")
        return _checked(sealed["document"], path)
    # What a document of another shape raises, when it is taken apart.
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise Corrupt(f"its meta cannot be read ({type(error).__name__}: {error})") from error


def _checked(document: dict, path: str) -> Document:
    if document["format"] > FORMAT:
        problem = f"{path} has format {document['format']}, this program reads up to {FORMAT}"
        raise Mismatch(f"{problem}: use a newer llmx")
    step, meta = document["step"], document["meta"]
    if type(step) is not int or step < 0 or not isinstance(meta, dict):
        raise ValueError("its step is not a number or its meta not a table")
    for name, leaf in document["leaves"].items():
        if leaf["type"] == "array":
            sizes = [*leaf["shape"], leaf["checksum"]]
            if not isinstance(leaf["dtype"], str) or not all(
                type(size) is int and size >= 0 for size in sizes
            ):
                raise ValueError(f"leaf {name!r} has shape {json_files.shown(leaf['shape'])}")
        elif not isinstance(leaf["value"], NUMBERS):
            raise ValueError(f"leaf {name!r} is not a number")
    leaves, saved_names = _renamed(document["leaves"], RENAMED[document.get("renamed", 0) :])
    slots = tuple(document.get("order", ()))
    layers = [slot for slot in slots if slot != EMPTY]
    if sorted(layers) != list(range(len(layers))) or (slots and not layers):
        raise ValueError("its order of layers does not hold each layer once")
    return Document(step, leaves, meta, LayerPermutation(slots), saved_names)


def _renamed(saved: Mapping[str, dict], rows: Sequence[tuple[str, str]]) -> tuple[dict, dict]:
    """`saved` under the current names, and {current name: saved name} where they differ."""
    leaves, saved_names = {}, {}
    for saved_name, leaf in saved.items():
        name = saved_name
        for pattern, replacement in rows:
            name = re.sub(pattern, replacement, name)
        if name in leaves:
            raise ValueError(f"two of its leaves have the name {name!r}")
        leaves[name] = leaf
        if name != saved_name:
            saved_names[name] = saved_name
    return leaves, saved_names


def _named(tree: Any, prefix: str) -> dict[str, Any]:
    """The leaves of `tree` by their path names in the whole state."""
    if prefix and jax.tree_util.all_leaves([tree]):
        return {prefix: tree}
    lead = f"{prefix}/" if prefix else ""
    return {lead + name: leaf for name, leaf in trees.named(tree).items()}


def is_key(leaf: Any) -> bool:
    """Whether the leaf is a PRNG key, which is written as its integers."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def as_stored(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract array that is written for `leaf`: itself, or the integers of a PRNG key."""
    sharding, array = leaf.sharding, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    if sharding is None:
        if jax.process_count() > 1:
            raise ValueError(f"abstract leaf {name!r} has no sharding: give it a NamedSharding")
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if is_key(leaf):
        array = jax.eval_shape(jax.random.key_data, array)
        if isinstance(sharding, jax.NamedSharding):
            axes = (*sharding.spec, *(None,) * (array.ndim - len(sharding.spec)))
            sharding = sharding.update(spec=jax.P(*axes))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


_key_data = jax.jit(jax.random.key_data)


def _wrap_key(data: jax.Array, like: Any) -> jax.Array:
    implementations = []
    # The generator of a key is public for arrays only; tracing gives one without allocation.
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), like)
    return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=implementations[0]))(data)


def _text(name: str, dtype: Any, shape: Any, order: LayerPermutation) -> str:
    return f"{dtype}{order.plain_shape(name, shape)}"
