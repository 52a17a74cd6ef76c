"""Activation checkpointing: what the forward pass saves for the backward pass, by name.

The model names values by `jax.ad_checkpoint.checkpoint_name`. A policy says which of them a layer
saves; all else is computed again, layer by layer. With segments only the input of each segment of
layers is saved, and the segment's layers are run again before their backward pass, in which they
save what the policy says. Saved values may be kept in host memory.

The config's `remat` is a list of rules, "where=policy" with commas between; the first that holds
for a layer decides:

    full                            all layers
    local=full,global=names         by kind of layer
    :20=full,attention+gate+up      layers 0 to 19, and the others
    every_4+attention               segments of 4 layers

A policy is one of `POLICIES`, or names of `SAVES` with + between, which `sqrt` or `every_N` may
precede. In a pipeline layers are counted within each model chunk, and `part`, alone or before the
rules (`part+dots`, `part+local=full,global=names`), keeps only the input of a chunk for each
microbatch: the backward operation runs the whole chunk again, in which the layers save what the
rules say.

Sources: arXiv 1604.06174; selective, arXiv 2205.05198; offload, arXiv 1602.08124.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from llmx.runtime import bounds

# What the model names in each layer, in order of appearance, with its logical size.
INPUT = "input"  # B T D, saved by every policy
ATTENTION_NORM, MLP_NORM = "attention_norm", "mlp_norm"  # B T D, what products take
# B T N H, B T K H: products; of latent attention, "key" has keys and values of all heads
QUERY, KEY, VALUE = "query", "key", "value"
# B T Q, B T R: what latent attention makes queries, keys and values of; its products
QUERY_LATENT, LATENT = "query_latent", "latent"
QUERY_KEY_VALUE = "query_key_value"  # the same, normalised and rotated: what attention takes
ATTENTION = "attention"  # B T N H, with the log-sum-exp of scores
ATTENTION_OUT, MLP_OUT = "attention_out", "mlp_out"  # B T D: products
GATE, UP = "gate", "up"  # B T F: products
HIDDEN = "hidden"  # B T F: what the MLP's last product takes
ROUTING = "routing"  # B T k, int32: the experts of a token, saved by every policy
PRODUCTS = (QUERY_LATENT, LATENT, QUERY, KEY, VALUE, ATTENTION_OUT, GATE, UP, MLP_OUT)
SAVES = (
    INPUT, ATTENTION_NORM, QUERY_LATENT, LATENT, QUERY, KEY, VALUE, QUERY_KEY_VALUE, ATTENTION,
    ATTENTION_OUT, MLP_NORM, GATE, UP, HIDDEN, MLP_OUT,
)  # fmt: skip
# Of the segments that `sqrt` and `every_N` make.
_SEGMENT_INPUT = "segment_input"
_PARTS = {"dynamic_slice", "squeeze"}  # how a layer takes its weights from the stack
_OF_TYPES = {"convert_element_type", "reshard"}
_EVERY = re.compile(r"every_([1-9][0-9]*)")
HOST_MEMORY = "pinned_host"  # the kind of memory that `OffloadConfig` is about


@dataclasses.dataclass
class OffloadConfig:
    """What is kept in the memory of the host."""

    saves: tuple[str, ...] = ()  # of what layers save: names in remat.SAVES
    optimizer: bool = False  # the optimizer's moments of matrices
    parameters: bool = False  # the layers' matrices, of which a layer fetches its own


@dataclasses.dataclass(frozen=True)
class Policy:
    """What layers save."""

    saved: frozenset[str] | None = frozenset()  # None: everything
    segment: int = 1  # layers of a segment; 0 = about the square root of their number


POLICIES: dict[str, Policy] = {
    "none": Policy(None),  # keep everything: fastest, most memory
    "full": Policy(),  # keep the input of each layer only: one more forward pass
    "dots": Policy(frozenset(PRODUCTS)),  # keep products with weights, not scores
    # Keep what attention takes and gives; norms and MLP are recomputed.
    "names": Policy(frozenset((QUERY_KEY_VALUE, ATTENTION))),
    # Keep the input of about sqrt(L) segments: up to two more forward passes.
    "sqrt": Policy(segment=0),
}
BUDGET = "budget"  # chosen by `llmx.aot.budget`
PART = "part"  # of a pipeline: see above


@dataclasses.dataclass(frozen=True)
class Rule:
    """A policy, and the layers that it holds for."""

    policy: Policy
    kind: str = ""  # "" = any
    first: int = 0
    end: int | None = None  # None: to the last

    def holds(self, layer: int, kind: str) -> bool:
        inside = self.first <= layer and (self.end is None or layer < self.end)
        return inside and self.kind in ("", kind)


def keeps_input(text: str) -> bool:
    """Whether `text` keeps only the input of each model chunk of a pipeline: "part"."""
    return text == PART or text.startswith(f"{PART}+")


def inside(text: str) -> str:
    """What `text` says of the layers of a chunk that is run again; `text`, where none is."""
    if not keeps_input(text):
        return text
    return text.removeprefix(PART).removeprefix("+") or "full"


def parse(text: str, kinds: Sequence[str]) -> tuple[Rule, ...]:
    """The rules of the config's `remat`, for a model with these kinds of layers.

    Behind "part+" they are those of a chunk that is run again; "part" alone is "part+full". Raises
    ValueError, naming the part that is wrong and what it may be.
    """
    if text == f"{PART}+":
        raise ValueError(f"remat={text!r}: name a policy behind +, for example 'part+dots'")
    text = inside(text)
    if text == BUDGET:
        raise ValueError(
            f"remat={text!r} is chosen by llmx.train and llmx.aot, which compile the step for it: "
            "give a policy here, for example remat='full'"
        )
    rules = tuple(_rule(part.strip(), kinds) for part in text.split(","))
    if any(rule.kind for rule in rules) and any(rule.policy.segment != 1 for rule in rules):
        raise ValueError(
            f"remat={text!r}: segments are of neighbouring layers of all kinds: give sqrt or "
            "every_N for all layers or for FIRST:END, without policies for one kind"
        )
    for number in range(1, len(rules)):
        if _complete(rules[:number], kinds):
            raise ValueError(
                f"remat={text!r}: its rule number {number + 1} holds for no layer, since those "
                "before it hold for all: the first that holds decides, so give it first"
            )
    if not _complete(rules, kinds):
        raise ValueError(
            f"remat={text!r} leaves layers without a policy: end it with a policy for all, "
            f"as in '{text},full'"
        )
    return rules


def _complete(rules: Sequence[Rule], kinds: Sequence[str]) -> bool:
    everywhere = [rule.kind for rule in rules if rule.first == 0 and rule.end is None]
    return "" in everywhere or set(kinds) <= set(everywhere)


def _rule(text: str, kinds: Sequence[str]) -> Rule:
    where, equals, policy = text.rpartition("=")
    if not equals:
        return Rule(_policy(text))
    if span := re.fullmatch(r"(\d*):(\d*)", where):
        first, end = (int(number) if number else None for number in span.groups())
        if end is not None and end <= (first or 0):
            raise ValueError(f"remat: {where!r} has no layers: use FIRST:END with FIRST below END")
        return Rule(_policy(policy), first=first or 0, end=end)
    if where not in kinds:
        raise ValueError(
            f"remat: {where!r} is no kind of layer of this model: use {' or '.join(kinds)}, or "
            "FIRST:END for some of the layers"
        )
    return Rule(_policy(policy), kind=where)


def _policy(text: str) -> Policy:
    if text in POLICIES:
        return POLICIES[text]
    segment, saved = 1, frozenset()
    for number, name in enumerate(text.split("+")):
        every = _EVERY.fullmatch(name)
        if number == 0 and (every or name == "sqrt"):
            segment = int(every.group(1)) if every else 0
        elif name in POLICIES and POLICIES[name].segment == 1:
            of_policy = POLICIES[name].saved
            saved = None if None in (saved, of_policy) else saved | of_policy
        elif name in SAVES:
            saved = None if saved is None else saved | {name}
        elif name == BUDGET:
            raise ValueError(f"remat={BUDGET!r} stands alone: it chooses for all layers")
        elif every or name == "sqrt":
            raise ValueError(f"remat={text!r}: sqrt or every_N stands first, and once")
        elif name == PART:
            raise ValueError(
                f"remat={text!r}: {PART} stands before all rules, and once, as in "
                "'part+:4=full,dots'"
            )
        else:
            known = bounds.use_one_of(name, (*POLICIES, PART, BUDGET))
            raise ValueError(
                f"remat={name!r} is unknown: {known}, or names of {', '.join(SAVES)} with "
                "+ between, behind sqrt or every_N"
            )
    return Policy(saved, segment)


def problems(text: str, offload: OffloadConfig, kinds: Sequence[str]) -> list[str]:
    """What is wrong with a config's `remat` and `offload`, each with its remedy."""
    found = []
    for name in offload.saves:
        if name not in SAVES:
            found.append(f"offload.saves: {name!r} is unknown: {bounds.use_one_of(name, SAVES)}")
    if text == BUDGET:
        return found
    try:
        rules = parse(text, kinds)
    except ValueError as error:
        return [*found, str(error)]
    if all(rule.policy.saved is not None for rule in rules):
        return found
    if offload.saves:
        found.append(
            f"offload.saves={offload.saves} with remat={text!r}, of which a part keeps everything "
            "on the device: name what is saved there, for example remat='dots'"
        )
    if offload.parameters:
        found.append(
            f"offload.parameters with remat={text!r}, of which a part keeps everything on the "
            "device, and so the weights that it has fetched: use for example remat='dots'"
        )
    return found


def series(
    rules: Sequence[Rule], num_layers: int, offset: int = 0
) -> Iterator[tuple[int, int, Callable]]:
    """(first, end, kind -> Policy) of the longest runs of layers for which the same rules hold.

    `offset`: the number, by which rules count, of the first layer.
    """
    edges = {0, num_layers}
    for rule in rules:
        bounds_of = (n - offset for n in (rule.first, rule.end) if n is not None)
        edges |= {min(max(n, 0), num_layers) for n in bounds_of}
    for first, end in itertools.pairwise(sorted(edges)):
        yield first, end, functools.partial(policy_of, rules, first + offset)


def union(policies: Iterable[Policy]) -> Policy:
    """What a layer saves whose kind is known at run time only: what any kind saves."""
    saved = [policy.saved for policy in policies]
    return Policy(None if None in saved else frozenset().union(*saved))


def policy_of(rules: Sequence[Rule], layer: int, kind: str) -> Policy:
    """What one layer saves."""
    return next(rule.policy for rule in rules if rule.holds(layer, kind))


def period_of(kinds: tuple[str, ...] | jax.Array) -> int:
    """The fewest layers after which their kinds repeat; 1 where these are known at run time."""
    num = len(kinds)
    if not isinstance(kinds, tuple):
        return 1
    return next(n for n in range(1, num + 1) if kinds == (kinds[:n] * num)[:num])


def segment_size(policy: Policy, num_layers: int, period: int = 1) -> int:
    """Layers of each segment but the last, in whole periods; 1 layer without segments.

    Where it is to be chosen, the fewest inputs are saved: of segments, and of one segment's layers.
    If that is no fewer than all layers have, as with up to 5, there are no segments.
    """
    if policy.segment == 1:
        return 1
    if policy.segment:
        return min(-(-policy.segment // period) * period, num_layers)
    sizes = range(period, num_layers + 1, period)
    best = min(sizes, key=lambda size: (-(-num_layers // size) + size, size))
    return best if -(-num_layers // best) + best < num_layers else 1


def checkpointed(function: Callable, policy: Policy, offloaded: Sequence[str] = ()) -> Callable:
    """`function(x, arrays)`, a layer, that saves what the policy says.

    Those of `SAVES` that are `offloaded` are saved too, in host memory.
    """
    if policy.saved is None:
        # Without this a loop would stack the weights that its layers read, all in fp32.
        return jax.checkpoint(function, policy=_all_but_views, prevent_cse=False)
    # Inside a scan the loop already keeps forward and backward apart: preventing CSE only costs.
    return _checkpoint(function, INPUT, policy.saved, offloaded, prevent_cse=False)


def _copies_nothing(primitive, *arrays, **parameters) -> bool:
    """Whether an array is a part of another, as the weights of a layer are of their stack; or
    another one in another type: a parameter as products read it, whose gradient is to have another
    type (`sharding.grad_buffers`), or numbers in a wider type."""
    if primitive.name in _PARTS:
        return True
    if primitive.name == "convert_element_type":
        return parameters["new_dtype"].itemsize > arrays[0].dtype.itemsize
    if primitive.name == "reshard":
        return bool(parameters["dst_sharding"].spec.reduced)
    body = parameters.get("call_jaxpr")  # of a function with its own gradient
    return body is not None and {one.primitive.name for one in body.eqns} <= _OF_TYPES


def _all_but_views(*operation, **parameters) -> bool:
    """The policy that saves everything, but no array twice."""
    return not _copies_nothing(*operation, **parameters)


def checkpointed_segment(function: Callable, offloaded: Sequence[str] = ()) -> Callable:
    """`function(x, arrays)`, a series of layers, that saves its input only."""
    in_host = (_SEGMENT_INPUT,) if INPUT in offloaded else ()
    return _checkpoint(function, _SEGMENT_INPUT, frozenset(), in_host, prevent_cse=True)


def _checkpoint(
    function, input_name: str, saved: frozenset[str], offloaded: Sequence[str], *, prevent_cse: bool
):  # fmt: skip
    policies, saved = jax.checkpoint_policies, saved | {ROUTING}
    if not offloaded:
        policy = policies.save_only_these_names(*sorted(saved))
    else:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(saved - set(offloaded)),
            names_which_can_be_offloaded=sorted(offloaded),
            offload_src="device", offload_dst=HOST_MEMORY,
        )  # fmt: skip

    def named(x, arrays):
        return function(checkpoint_name(x, input_name), arrays)

    return jax.checkpoint(named, policy=policy, prevent_cse=prevent_cse)
