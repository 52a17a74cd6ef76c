"""How replicas along `data` synchronize: the section `sync` of a config."""

import dataclasses

from llmx.runtime.bounds import MACHINE, bounded, choice, plain


def _of(*strategies: str) -> dict[str, tuple[str, ...]]:
    """What a key needs that these strategies alone look at."""
    return {"sync.strategy": strategies}


_ROUNDS, _GROUPS = _of("local_sgd", "diloco"), {"sync.groups": {"not": (1,)}}
_COMPRESSED = {"a compressor": True}


@dataclasses.dataclass
class SyncConfig:
    """How the replicas on `data` synchronize."""

    strategy: str = "mean"  # a name in STRATEGIES
    # steps of "mean" first; -1 (one_bit): until the variance has settled
    warmup_steps: int = bounded(0, at_least=-1, needs={"sync.strategy": {"not": ("mean",)}})
    # what compression leaves out goes in with the next exchange
    error_feedback: bool = plain(True, needs=_COMPRESSED)
    # compressed tensors are fused into messages of this size
    bucket_mib: float = bounded(32.0, above=0, needs=_COMPRESSED)
    # names of parameters that are exchanged in full beside a compressor: ("*norm*", "embedding")
    uncompressed: tuple[str, ...] = plain((), needs=_COMPRESSED)
    # one_bit, one_bit_lamb, zero_one: size of a row's signs, "rms" | "mean" of its numbers' sizes
    scale: str = choice("rms", ("rms", "mean"), needs=_of("one_bit", "one_bit_lamb", "zero_one"))
    rank: int = bounded(4, at_least=1, needs=_of("power_sgd"))  # power_sgd
    # top_k: of the numbers, how many are sent
    fraction: float = bounded(0.01, above=0, at_most=1, needs=_of("top_k"))
    # top_k: of what replicas exchange, in the place of the optimizer's (optimizer.b1=0); 0 = none
    momentum: float = bounded(0.0, at_least=0, below=1, needs=_of("top_k"))
    # top_k: steps after the warm-up in which the fraction falls, from 1/4 by quarters; 0 = none
    ramp_steps: int = bounded(0, at_least=0, needs=_of("top_k"))
    # local_sgd, diloco: steps between exchanges; zero_one: at most this many
    every: int = bounded(30, at_least=1, needs=_of("local_sgd", "diloco", "zero_one"))
    # local_sgd, diloco: a replica counts in a round by the tokens that it has trained on; one
    # without any is left out
    by_tokens: bool = plain(False, needs=_ROUNDS)
    # local_sgd, diloco: exchanges average the moments of adamw or lamb too
    average_moments: bool = plain(False, needs=_ROUNDS)
    # diloco: parts of the model that are exchanged at different steps
    fragments: int = bounded(1, at_least=1, needs=_of("diloco"))
    # diloco: of the optimizer between replicas
    outer_learning_rate: float = bounded(0.7, at_least=0, below=10, needs=_of("diloco"))
    # diloco: its Nesterov momentum
    outer_momentum: float = bounded(0.9, at_least=0, below=1, needs=_of("diloco"))
    # local_sgd, diloco: what replicas have moved is sent so: "fp32" | "int8" | "int4" | "fp8"
    outer_format: str = choice("fp32", ("fp32", "int8", "int4", "fp8"), needs=_ROUNDS)
    # local_sgd, diloco: exchanges run beside the next step, and arrive after it
    overlap: bool = plain(False, needs=_ROUNDS)
    # local_sgd, diloco: groups of replicas that are runs of their own; a round is of all of them
    groups: int = bounded(1, at_least=1, at_most=9999)
    # of several groups, the number of this one
    group: int = bounded(0, at_least=0, needs=_GROUPS)
    # of several groups, the folder or URL in which they meet
    exchange: str = plain("", of=MACHINE, needs=_GROUPS)
    # of several groups: how long one that has ended its round waits for the others
    round_seconds: float = bounded(600.0, above=0, at_most=3000, needs=_GROUPS)
    # stale: steps that a gradient may come late; 0 = none
    staleness: int = bounded(2, at_least=0, needs=_of("stale"))
    # stale: replicas do not wait for one that is later still
    asynchronous: bool = plain(False, needs=_of("stale"))
