"""Local SGD and DiLoCo between programs: groups of replicas that come and go.

In one program all devices take part in every exchange, and one that dies ends it. Here each group
of replicas is a run of its own, with its own processes and work directory. After a round each
leaves what it has moved in a folder or object store (`round_files`), waits for the others until a
deadline, and takes the mean over the groups that came, weighted by the tokens that they trained on.
The first that closes a round says which those are. The outer optimizer's step is then computed by
every group from the same numbers, on the host, where all machines round alike: after a round all
groups are equal to the last bit.

A group that was gone, or came too late, takes over what the others share and goes on from the step
where they are: steps that it missed it does not make up for. The state of its inner optimizer stays
as it was; that of a new group is new.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from llmx.contract import State, Strategy
from llmx.data import remote
from llmx.runtime import launch
from llmx.runtime.agreement import Peers
from llmx.sharding import trees
from llmx.sync import local
from llmx.sync.replicas import AXIS, WHOLE, StrategyInputs
from llmx.sync.round_files import Outer, RoundFiles

POLL_SECONDS = 0.5  # between looks at whether others have come
SAY_SECONDS = 60.0  # between signs of life to the group's other processes


def make(inputs: StrategyInputs) -> Strategy:
    """`local.make`, whose outer steps are rounds of all groups where there are several."""
    strategy = local.make(inputs)
    if inputs.config.groups == 1:
        return strategy
    rounds = Rounds(inputs)
    outer = dict.fromkeys(strategy.outer, rounds.finish)
    return strategy._replace(outer=outer, begin=rounds.begin, waits=True)


def conflicts(config: Any) -> list[str]:
    """What several groups cannot go with."""
    sync = config.sync
    if sync.groups == 1:
        return []
    found, name = [], f"sync.groups={sync.groups}"
    if sync.strategy not in ("local_sgd", "diloco"):
        found.append(
            f"{name} with sync.strategy={sync.strategy!r}: groups exchange what they have moved in "
            "rounds of local steps; use 'diloco' or 'local_sgd', or one group"
        )
    if not 0 <= sync.group < sync.groups:
        found.append(f"sync.group={sync.group} with {name}: groups are 0 to {sync.groups - 1}")
    if not sync.exchange:
        found.append(f"{name} without sync.exchange: name a folder or URL that all groups see")
    found += remote.problems("sync.exchange=", sync.exchange)
    found += filter(None, [_missing(sync.exchange)])
    if sync.warmup_steps:
        found.append(
            f"{name} with sync.warmup_steps={sync.warmup_steps}: steps of 'mean' are of one "
            "program; set it to 0, and begin with the parameters of another run (start_from)"
        )
    found += [
        f"{name} with sync.{key}={value}: {why}; leave it out"
        for key, value, plain, why in (
            ("fragments", sync.fragments, 1, "groups exchange the whole model"),
            ("overlap", sync.overlap, False, "a round is between two steps"),
            ("average_moments", sync.average_moments, False, "groups keep their moments"),
            ("outer_format", sync.outer_format, "fp32", "files hold numbers in fp32"),
        )
        if value != plain
    ]
    if config.watchdog.step_factor and sync.round_seconds >= config.watchdog.save_seconds:
        found.append(
            f"sync.round_seconds={sync.round_seconds:g} with watchdog.save_seconds="
            f"{config.watchdog.save_seconds:g}, which a round may take: raise the second"
        )
    return found


def _missing(exchange: str) -> str:
    """That the folder in which groups meet is not there; "" where it is."""
    if not exchange or remote.is_url(exchange) or os.path.isdir(exchange):
        return ""
    return f"sync.exchange={exchange} is no folder: make the one that all groups see, or mount it"


class Rounds:
    """The outer steps of one group. `begin` comes first; every process of the group calls both."""

    def __init__(self, inputs: StrategyInputs):
        self._inputs, self._config = inputs, inputs.config
        self._moved = jax.jit(_make_moved(inputs))
        self._shapes = {name: leaf.shape for name, leaf in trees.named(inputs.loss.params).items()}
        self._ends = [
            step + 1
            for step in range(inputs.timetable.total_steps)
            if inputs.timetable.fragments_after(step)
        ]
        self._peers, self._files = Peers(), None

    def begin(self, state: State, peers: Peers) -> State:
        """The state in which this group goes on: as it is, or what the others share by now.

        Raises ValueError where the folder is missing or of other groups, OSError where it cannot be
        used.
        """
        config, self._peers = self._config, peers
        if problem := _missing(config.exchange):
            raise ValueError(problem)
        self._files = files = RoundFiles(config.exchange, config.group, self._shapes)
        steps = int(jax.device_get(state.step))
        last = max((end for end in self._ends if end <= steps), default=0)
        mine = Outer(last, *(_on_host(trees.named(of)) for of in (state.params, state.sync.outer)))
        newest = last
        if self._peers.index == 0:
            files.agree(self._inputs.agreed | {f"shape of {k}": v for k, v in self._shapes.items()})
            if (found := files.newest()) is None or found < last:
                files.write_outer(mine)
            newest = files.newest()
        newest = int(self._peers.broadcast("newest round", str(newest)))
        outer = mine if newest == last != 0 else files.read_outer(newest)
        # The group that closed a round may have died before it wrote what came of it.
        while (end := self._next(outer.steps)) and (groups := self._closed(end)):
            outer = self._after(outer, end, groups)
        if outer.steps > last or steps == 0:
            state = self._adopted(state, outer)
        if outer.steps > steps:
            launch.log(
                f"group {config.group} goes on from step {outer.steps}, where the others are: "
                f"{outer.steps - steps} steps are left out"
            )
        self._announce(max(steps, outer.steps))
        return state

    def finish(self, state: State) -> State:
        """The end of a round: the state with what comes of it. Communicates over `data`, and with
        the other groups."""
        stopped, steps = jax.device_get((state.guard.stopped, state.step))
        if stopped:
            return state
        steps, begun = int(steps), time.monotonic()
        moved, tokens = self._moved(state)
        moved, tokens = _on_host(moved), float(_on_host({"": tokens})[""])
        if not all(np.isfinite(array).all() for array in moved.values()):
            launch.log(f"step {steps}: what this group has moved is not finite, and does not count")
            moved, tokens = {name: np.zeros_like(array) for name, array in moved.items()}, 0.0
        newest, groups = self._decided(steps, moved, tokens)
        if newest > steps:
            outer = self._files.read_outer(newest)
            text = f"came late: it goes on from step {newest}, where the others are"
        else:
            before = Outer(0, *(_on_host(trees.named(a)) for a in (state.params, state.sync.outer)))
            outer = self._after(before, steps, groups)
            if self._peers.index == 0 and groups[0] == self._config.group:
                self._files.write_outer(outer)
            names = ", ".join(map(str, groups)) or "none"
            left = "" if self._config.group in groups else ": this one came late, and is left out"
            text = f"round of groups {names} of {self._config.groups}{left}"
        launch.log(
            f"step {steps}: group {self._config.group}: {text} ({time.monotonic() - begun:.1f} s)"
        )
        self._announce(outer.steps)
        return self._adopted(state, outer)

    def _next(self, steps: int) -> int:
        """The end of the round after so many steps; 0 = there is none."""
        return next((end for end in self._ends if end > steps), 0)

    def _closed(self, end: int) -> list[int] | None:
        found = self._files.closed(end) if self._peers.index == 0 else None
        return json.loads(self._peers.broadcast("closed round", json.dumps(found)))

    def _announce(self, steps: int) -> None:
        if self._peers.index == 0 and (end := self._next(steps)):
            self._files.begin(end)

    def _decided(self, steps: int, moved: dict, tokens: float) -> tuple[int, list[int]]:
        """(The newest steps that groups share the state of, the groups that count in this round),
        as process 0 finds them."""
        say = lambda found: self._peers.broadcast("round", json.dumps(found))  # noqa: E731
        if self._peers.index:
            while (found := json.loads(say(None))) is None:
                pass
            return tuple(found)
        newest, groups = self._files.newest() or 0, []
        if newest <= steps:
            groups = self._files.closed(steps)
            if groups is None:
                self._files.publish(steps, moved, tokens)
                groups = self._waited(steps, lambda: say(None))
        say([newest, groups])
        return newest, groups

    def _waited(self, steps: int, say: Callable[[], Any]) -> list[int]:
        """The groups that count in a round: those of the round before, of the first all, and those
        that have begun this one; or those that have come until the deadline."""
        before = max((end for end in self._ends if end < steps), default=0)
        known = self._files.closed(before) if before else None
        known = set(range(self._config.groups) if known is None else known)
        begun_at = said = time.monotonic()
        while (groups := self._files.closed(steps)) is None:
            begun, moved = self._files.groups_in(steps)
            if (known | begun) <= moved or time.monotonic() - begun_at > self._config.round_seconds:
                return self._files.close(steps, sorted(moved))
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                say()
            time.sleep(POLL_SECONDS)
        return groups

    def _after(self, before: Outer, steps: int, groups: list[int]) -> Outer:
        """What all groups share after a round."""
        config, params, momentum = self._config, {}, {}
        tokens = self._files.tokens(steps, groups)
        if not sum(tokens):
            return before._replace(steps=steps)
        weights = [np.float32(each / sum(tokens)) for each in tokens]
        whole = steps % config.every == 0  # there is no warm-up
        for name, old in before.params.items():
            moved = sum(
                weight * self._files.moved(steps, group, name)
                for weight, group in zip(weights, groups, strict=True)
            )
            params[name], kept = outer_update(config, old, moved, before.momentum.get(name), whole)
            if kept is not None:
                momentum[name] = kept
        return Outer(steps, params, momentum)

    def _adopted(self, state: State, outer: Outer) -> State:
        """The state with all replicas at what groups share."""
        sync, like = state.sync, self._inputs.loss.params
        size = self._inputs.replicas.size
        stacked = {name: np.broadcast_to(a, (size, *a.shape)) for name, a in outer.params.items()}
        zeros = np.zeros(sync.tokens.shape, sync.tokens.dtype)
        params = trees.unnamed(_placed(outer.params, trees.named(state.params)), like)
        own = trees.unnamed(_placed(stacked, trees.named(sync.params)), like)
        momentum = _placed(outer.momentum, sync.outer)
        number = np.asarray(outer.steps, state.step.dtype)
        rest = _placed(
            {"tokens": zeros, "step": number}, {"tokens": sync.tokens, "step": state.step}
        )
        sync = sync._replace(params=own, outer=momentum, tokens=rest["tokens"])
        return state._replace(step=rest["step"], params=params, sync=sync)


def outer_update(
    config: Any, old: np.ndarray, moved: np.ndarray, momentum: np.ndarray | None, whole: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """A parameter and its outer momentum after a round: `local`'s, on the host.

    `whole`: the round was not cut short by the end of the run.
    """
    if momentum is None or not whole:
        return old - moved, momentum
    decay, rate = np.float32(config.outer_momentum), np.float32(config.outer_learning_rate)
    momentum = decay * momentum + moved
    return old - rate * (moved + decay * momentum), momentum


def _make_moved(inputs: StrategyInputs) -> Callable[[State], tuple[dict, jax.Array]]:
    """State -> (what this group has moved, its mean over replicas by their tokens, fp32 by name;
    its tokens, fp32 []). Communicates over `data`."""
    replicas = inputs.replicas

    def region(params, own, tokens):
        total = jax.lax.psum(tokens[0], AXIS)
        weight = tokens[0] / jnp.maximum(total, 1)
        terms = {k: (params[k] - own[k][0]).astype(jnp.float32) * weight for k in params}
        return jax.lax.psum(terms, AXIS), total

    def moved(state: State) -> tuple[dict, jax.Array]:
        params, own = local.as_updated(inputs, state.params, state.sync.params)
        in_specs = (replicas.specs, replicas.stacked_specs, PartitionSpec(AXIS))
        return replicas.region(region, in_specs=in_specs, out_specs=(replicas.specs, WHOLE))(
            params, own, state.sync.tokens
        )

    return moved


def _on_host(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Whole arrays in every process of the group. Communicates over all axes."""
    if all(array.is_fully_addressable for array in arrays.values()):
        return {name: np.asarray(a) for name, a in jax.device_get(dict(arrays)).items()}
    from jax.experimental import multihost_utils

    with jax.transfer_guard("allow"):
        return {
            name: np.asarray(multihost_utils.process_allgather(array, tiled=True))
            for name, array in arrays.items()
        }


def _placed(
    arrays: Mapping[str, np.ndarray], like: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """On the devices, split and in the memory as what they take the place of."""

    def one(array: np.ndarray, old: jax.Array) -> jax.Array:
        part = lambda index: np.asarray(array[index], old.dtype)  # noqa: E731
        return jax.make_array_from_callback(old.shape, old.sharding, part)

    with jax.transfer_guard("allow"):
        return {name: one(arrays[name], old) for name, old in like.items()}
