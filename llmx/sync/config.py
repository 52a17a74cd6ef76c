"""How replicas along `data` synchronize: the section `sync` of a config."""

import dataclasses

from llmx.runtime.bounds import MACHINE, bounded, choice, plain


@dataclasses.dataclass
class SyncConfig:
    """How the replicas on `data` synchronize."""

    strategy: str = "mean"  # a name in STRATEGIES
    # steps of "mean" first; -1 (one_bit): until the variance has settled
    warmup_steps: int = bounded(0, at_least=-1)
    error_feedback: bool = True  # what compression leaves out goes in with the next exchange
    # compressed tensors are fused into messages of this size
    bucket_mib: float = bounded(32.0, above=0)
    # names of parameters that are exchanged in full beside a compressor: ("*norm*", "embedding")
    uncompressed: tuple[str, ...] = ()
    # one_bit, one_bit_lamb, zero_one: size of a row's signs, "rms" | "mean" of its numbers' sizes
    scale: str = choice("rms", ("rms", "mean"))
    rank: int = bounded(4, at_least=1)  # power_sgd
    fraction: float = bounded(0.01, above=0, at_most=1)  # top_k: of the numbers, how many are sent
    # top_k: of what replicas exchange, in the place of the optimizer's (optimizer.b1=0); 0 = none
    momentum: float = bounded(0.0, at_least=0, below=1)
    # top_k: steps after the warm-up in which the fraction falls, from 1/4 by quarters; 0 = none
    ramp_steps: int = bounded(0, at_least=0)
    # local_sgd, diloco: steps between exchanges; zero_one: at most this many
    every: int = bounded(30, at_least=1)
    # local_sgd, diloco: a replica counts in a round by the tokens that it has trained on; one
    # without any is left out
    by_tokens: bool = False
    # local_sgd, diloco: exchanges average the moments of adamw or lamb too
    average_moments: bool = False
    # diloco: parts of the model that are exchanged at different steps
    fragments: int = bounded(1, at_least=1)
    # diloco: of the optimizer between replicas
    outer_learning_rate: float = bounded(0.7, at_least=0, below=10)
    outer_momentum: float = bounded(0.9, at_least=0, below=1)  # diloco: its Nesterov momentum
    # local_sgd, diloco: what replicas have moved is sent so: "fp32" | "int8" | "int4" | "fp8"
    outer_format: str = choice("fp32", ("fp32", "int8", "int4", "fp8"))
    # local_sgd, diloco: exchanges run beside the next step, and arrive after it
    overlap: bool = False
    # local_sgd, diloco: groups of replicas that are runs of their own; a round is of all of them
    groups: int = bounded(1, at_least=1, at_most=9999)
    group: int = bounded(0, at_least=0)  # of several groups, the number of this one
    # of several groups, the folder or URL in which they meet
    exchange: str = plain("", of=MACHINE)
    # of several groups: how long one that has ended its round waits for the others
    round_seconds: float = bounded(600.0, above=0, at_most=3000)
    staleness: int = bounded(2, at_least=0)  # stale: steps that a gradient may come late; 0 = none
    asynchronous: bool = False  # stale: replicas do not wait for one that is later still
