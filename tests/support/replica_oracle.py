"""What replicas do by each strategy, in float64 and NumPy alone: an oracle that shares no code with
llmx.

Parameters are a dict of arrays; those whose name begins with "blocks/" have their layers first. A
`Problem` gives gradients. What is known before a run by other means is data here: when there is an
exchange, and how late gradients are.

Letters: n replicas, L rows (layers), R numbers of a row.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

TIE = 1e-6  # of the scale of its row: an input nearer to zero may have either sign in fp32


@dataclasses.dataclass
class Settings:
    """Numbers of the optimizer and of the section `sync`."""

    steps: int = 50
    rate: float = 0.02  # peak: reached after `rate_warmup`, then a line to a tenth at the end
    rate_warmup: int = 5
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 0.0
    warmup: int = 8  # steps of the mean
    every: int = 7
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    scale: str = "rms"
    least: float = 0.1  # of a frozen variance's root, of its row's root mean square
    fraction: float = 0.1
    momentum: float = 0.5
    ramp: int = 8
    rank: int = 2

    def rate_at(self, step: int) -> float:
        count = step + 1
        if count < self.rate_warmup:
            return self.rate * count / self.rate_warmup
        done = (count - self.rate_warmup) / (self.steps - self.rate_warmup)
        return self.rate * (1 - 0.9 * done)


@dataclasses.dataclass
class Problem:
    """A sum of squares: replica i's gradient at step t is curvature x (x - centers[t][i])."""

    start: dict  # parameters
    curvature: dict
    centers: list  # by step, a dict of [n, ...]
    active: list  # by step, a dict of bool: where there is a gradient at all
    tokens: np.ndarray  # [steps, n]
    decays: dict  # by name, whether weight decay applies

    @property
    def n(self) -> int:
        return self.tokens.shape[1]

    def shares(self, step: int) -> np.ndarray:
        return self.tokens[step] / max(self.tokens[step].sum(), 1)

    def gradient(self, step: int, i: int, x: dict) -> dict:
        return {
            k: self.active[step][k] * self.curvature[k] * (x[k] - self.centers[step][k][i])
            for k in x
        }


def rows(name: str, x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x) if name.startswith("blocks/") else 1, -1)


def per_row(name: str, numbers: np.ndarray, like: np.ndarray) -> np.ndarray:
    return numbers.reshape(-1, *[1] * (like.ndim - 1))


def total(trees: list) -> dict:
    return {k: sum(tree[k] for tree in trees) for k in trees[0]}


def scaled(tree: dict, factor: float) -> dict:
    return {k: factor * x for k, x in tree.items()}


def length(tree: dict) -> float:
    return np.sqrt(sum(np.sum(x**2) for x in tree.values()))


def clipped(tree: dict, most: float) -> dict:
    return scaled(tree, most / max(length(tree), most)) if most else tree


class Adam:
    """AdamW or LAMB of one set of parameters."""

    def __init__(self, s: Settings, problem: Problem, kind: str = "adamw"):
        self.s, self.kind, self.decays, self.count = s, kind, problem.decays, 0
        self.m = {k: np.zeros_like(x) for k, x in problem.start.items()}
        self.v = {k: np.zeros_like(x) for k, x in problem.start.items()}
        self.average = {k: np.zeros(len(rows(k, x))) for k, x in problem.start.items()}

    def moments(self, g: dict):
        s = self.s
        self.count += 1
        self.m = {k: s.b1 * self.m[k] + (1 - s.b1) * g[k] for k in g}
        self.v = {k: s.b2 * self.v[k] + (1 - s.b2) * g[k] ** 2 for k in g}

    def direction(self) -> dict:
        c1, c2 = 1 - self.s.b1**self.count, 1 - self.s.b2**self.count
        return {k: self.m[k] / c1 / (np.sqrt(self.v[k] / c2) + self.s.eps) for k in self.m}

    def with_decay(self, u: dict, x: dict) -> dict:
        return {k: u[k] + self.s.decay * x[k] * self.decays[k] for k in u}

    def step(self, g: dict, x: dict, rate: float) -> dict:
        self.moments(g)
        u = self.with_decay(self.direction(), x)
        if self.kind == "lamb":
            for k in u:
                of_x, of_u = (np.sqrt((rows(k, each) ** 2).sum(1)) for each in (x[k], u[k]))
                ratio = np.where((of_x > 0) & (of_u > 0), of_x / np.where(of_u > 0, of_u, 1), 1)
                self.average[k] = 0.9 * self.average[k] + 0.1 * ratio.clip(0.01, 10)
                u[k] = u[k] * per_row(k, ratio, u[k])
        return {k: x[k] - rate * u[k] for k in x}

    def copy(self) -> "Adam":
        new = object.__new__(Adam)
        new.__dict__.update(self.__dict__)
        return new


# ------------------------------------------------------------------------------------- compressors


class Signs:
    """A sum of signs with the errors of workers and of servers."""

    def __init__(self, s: Settings, start: dict, n: int, full: tuple = ()):
        self.scale, self.ties, self.full = s.scale, 0, full
        self.errors = {k: np.zeros((n, *x.shape)) for k, x in start.items()}
        self.server = {k: np.zeros_like(x) for k, x in start.items()}

    def compressed(self, name: str, x: np.ndarray, live: np.ndarray) -> np.ndarray:
        x_LR, live_LR = rows(name, x), rows(name, live)
        count = np.maximum(live_LR.sum(1), 1)
        of = np.abs if self.scale == "mean" else np.square
        size = np.where(live_LR, of(x_LR), 0).sum(1) / count
        size = size if self.scale == "mean" else np.sqrt(size)
        self.ties += np.sum((np.abs(x_LR) < TIE * size[:, None]) & live_LR & (x_LR != 0))
        sent = np.where(x_LR >= 0, size[:, None], -size[:, None])
        return np.where(live_LR, sent, 0).reshape(x.shape)

    def __call__(self, terms: list, live: dict) -> tuple[dict, dict]:
        """The sum where numbers live, and where others have come to live."""
        sums, born = {}, {}
        for k, on in live.items():
            inputs = [term[k] + error for term, error in zip(terms, self.errors[k], strict=True)]
            if k in self.full:
                sums[k] = np.where(on, sum(inputs), 0)
                self.errors[k] = np.stack([np.where(on, 0, x) for x in inputs])
                born[k] = ~on & np.any([x != 0 for x in inputs], axis=0)
                continue
            sent = [self.compressed(k, x, on) for x in inputs]
            self.errors[k] = np.stack([x - y for x, y in zip(inputs, sent, strict=True)])
            arrived = np.where(on, sum(sent) + self.server[k], 0)
            sums[k] = self.compressed(k, arrived, on)
            self.server[k] = arrived - sums[k]
            born[k] = ~on & np.any([x != 0 for x in inputs], axis=0)
        return sums, born


CODES = {"int8": 127, "int4": 7, "fp8": 448}  # the largest of each


def coded(x: np.ndarray, block: int, code: str) -> tuple[np.ndarray, int]:
    """Rows [.., Q] in codes that share a scale, by which the largest of a block is the largest
    code; and how many of them fp32 may round to another."""
    largest, blocks = CODES[code], x.reshape(-1, block)

    size = np.abs(blocks).max(1, keepdims=True) / largest
    steps = blocks / np.where(size > 0, size, 1)

    def codes(nudge: float) -> np.ndarray:
        nudged = np.clip(steps + nudge * largest, -largest, largest)
        if code == "fp8":
            return nudged.astype("f4").astype(ml_dtypes.float8_e4m3fn).astype("f8")
        return np.round(nudged)

    return (codes(0) * size).reshape(x.shape), int((codes(TIE) != codes(-TIE)).sum())


class Coded:
    """Sums in codes: to the servers, and from them."""

    def __init__(self, s: Settings, start: dict, n: int, code: str = "int8"):
        self.n, self.server, self.code, self.ties = n, {}, code, 0
        self.errors = {k: np.zeros((n, *x.shape)) for k, x in start.items()}

    def part(self, k: str, terms: list, layers: slice) -> np.ndarray:
        """The sum of some layers of a parameter, whose errors are kept by themselves."""
        self.errors = {k: np.zeros((self.n, *terms[0].shape))} | {
            name: kept for name, kept in self.errors.items() if kept.shape[1:] == terms[0].shape
        }
        return self([{k: term} for term in terms], 0)[k]

    def __call__(self, terms: list, step: int) -> dict:
        sums = {}
        for k in terms[0]:
            shape, R = terms[0][k].shape, rows(k, terms[0][k]).shape[1]
            part = -(-R // self.n)
            block = min(
                512 if self.code == "int4" else 256, max(8, 2 ** int(np.ceil(np.log2(part))))
            )
            part = -(-part // block) * block
            padded = lambda x: np.pad(x, ((0, 0), (0, self.n * part - R)))  # noqa: B023, E731
            arrived = 0
            for i, term in enumerate(terms):
                x_LR = padded(rows(k, term[k] + self.errors[k][i]))
                sent, ties = coded(x_LR, block, self.code)
                self.ties += ties
                self.errors[k][i] = (x_LR - sent)[:, :R].reshape(shape)
                arrived = arrived + sent
            arrived = arrived + self.server.get(k, 0)
            answer, ties = coded(arrived, block, self.code)
            self.ties += ties
            self.server[k] = arrived - answer
            sums[k] = answer[:, :R].reshape(shape)
        return sums


class TopK:
    """The largest of each replica's momentum, which begins anew where it was sent."""

    def __init__(self, s: Settings, start: dict, n: int):
        self.s = s
        self.errors = [{k: np.zeros_like(x) for k, x in start.items()} for _ in range(n)]
        self.own = [{k: np.zeros_like(x) for k, x in start.items()} for _ in range(n)]

    def fraction(self, step: int) -> float:
        ramp = [f for f in (1 / 4, 1 / 16, 1 / 64, 1 / 256) if f > self.s.fraction]
        done = step - self.s.warmup
        inside = self.s.ramp and done < self.s.ramp
        return ramp[done * len(ramp) // self.s.ramp] if inside else self.s.fraction

    def __call__(self, terms: list, step: int) -> dict:
        sums = {k: np.zeros_like(x) for k, x in terms[0].items()}
        for i, term in enumerate(terms):
            for k in term:
                b = self.s.momentum
                self.own[i][k] = b * self.own[i][k] + (1 - b) * term[k]
                x_LR = rows(k, self.own[i][k] + self.errors[i][k])
                count = max(1, round(self.fraction(step) * x_LR.shape[1]))
                sent = np.zeros_like(x_LR)
                for row, x in enumerate(x_LR):
                    top = np.argsort(-np.abs(x), kind="stable")[:count]
                    sent[row, top] = x[top]
                sums[k] += sent.reshape(sums[k].shape)
                self.errors[i][k] = (x_LR - sent).reshape(sums[k].shape)
                self.own[i][k] = np.where(self.errors[i][k] == 0, 0, self.own[i][k])
        return sums


class PowerSGD:
    def __init__(self, s: Settings, start: dict, n: int):
        self.rank, self.queries = s.rank, {}
        self.errors = [{k: np.zeros_like(x) for k, x in start.items()} for _ in range(n)]

    def __call__(self, terms: list, step: int) -> dict:
        sums = {}
        for k, like in terms[0].items():
            a, b = like.shape[-2:] if like.ndim > 1 else (0, 0)
            if self.rank * (a + b) >= a * b:
                sums[k] = sum(term[k] for term in terms)
                continue
            stacked = [
                (term[k] + error[k]).reshape(-1, a, b)
                for term, error in zip(terms, self.errors, strict=True)
            ]
            start = np.cos(np.arange(b * self.rank, dtype=float) ** 2).reshape(b, self.rank)
            query = self.queries.get(k, np.broadcast_to(start, (len(stacked[0]), b, self.rank)))
            left, _ = np.linalg.qr(sum(x @ query for x in stacked))
            rights = [x.swapaxes(1, 2) @ left for x in stacked]
            self.queries[k] = sum(rights)
            sums[k] = (left @ sum(rights).swapaxes(1, 2)).reshape(like.shape)
            for x, right, error in zip(stacked, rights, self.errors, strict=True):
                error[k] = (x - left @ right.swapaxes(1, 2)).reshape(like.shape)
        return sums


class InFull:
    """An exchange of gradients of which some parameters are summed as they are."""

    def __init__(self, exchange: Callable, names: tuple):
        self.exchange, self.names = exchange, names

    def __call__(self, terms: list, step: int) -> dict:
        rest = [{k: x for k, x in term.items() if k not in self.names} for term in terms]
        return self.exchange(rest, step) | {k: sum(t[k] for t in terms) for k in self.names}


# -------------------------------------------------------------------------------------- strategies


def shares_at(problem: Problem, step: int, x) -> list:
    """Each replica's term of the gradient, at parameters that are the same or a list."""
    xs = x if isinstance(x, list) else [x] * problem.n
    shares = problem.shares(step)
    return [scaled(problem.gradient(step, i, xs[i]), shares[i]) for i in range(problem.n)]


def gradients(problem: Problem, s: Settings, exchange: Callable | None) -> list[dict]:
    """The parameters after each step, by `exchange`d gradients; None = the mean."""
    x, adam, found = problem.start, Adam(s, problem), []
    for step in range(s.steps):
        terms = shares_at(problem, step, x)
        mean = exchange is None or step < s.warmup
        g = total(terms) if mean else exchange(terms, step)
        x = adam.step(clipped(g, s.clip), x, s.rate_at(step))
        found.append(x)
    return found


def stale(problem: Problem, s: Settings, delays: np.ndarray, staleness: int) -> list[dict]:
    """`delays` [steps, n], of which the first is that of the first step after the warm-up."""
    x, adam, found = problem.start, Adam(s, problem), []
    zero = {k: np.zeros_like(leaf) for k, leaf in x.items()}
    late = [[zero] * problem.n for _ in range(staleness + 1)]  # by steps to come, and replica
    for step in range(s.steps):
        rate = s.rate_at(step)
        if step < s.warmup:
            x = adam.step(clipped(total(shares_at(problem, step, x)), s.clip), x, rate)
            found.append(x)
            continue
        none, views = adam.copy().step(zero, x, rate), []
        for i in range(problem.n):
            own = adam.copy().step(total([of[i] for of in late]), x, rate)
            views.append({k: x[k] + own[k] - none[k] for k in x})
        for i, term in enumerate(shares_at(problem, step, views)):
            slot = late[delays[step - s.warmup][i]]
            slot[i] = total([slot[i], term])
        x = adam.step(clipped(total(late[0]), s.clip), x, rate)
        late = [*late[1:], [zero] * problem.n]
        found.append(x)
    return found


def least(v: dict, bias: float, share: float) -> dict:
    found = {}
    for k, each in v.items():
        of_rows = [row[row > 0].mean() for row in rows(k, each)]
        found[k] = per_row(k, share * np.sqrt(np.array(of_rows) / bias), each)
    return found


def one_bit(problem: Problem, s: Settings, kind: str, full: tuple = ()) -> tuple[list[dict], int]:
    """1-bit Adam or 1-bit LAMB: (parameters after each step, near ties of signs)."""
    x, adam, found = problem.start, Adam(s, problem, kind), []
    signs, n = Signs(s, x, problem.n, full), problem.n
    bias, b1, b2 = 1 - s.b2**s.warmup, s.b1, s.b2
    factor = {k: np.ones(len(rows(k, leaf))) for k, leaf in x.items()}
    fresh = None
    for step in range(s.steps):
        terms, rate = shares_at(problem, step, x), s.rate_at(step)
        if step < s.warmup:
            x = adam.step(total(terms), x, rate)
            found.append(x)
            continue
        fresh = fresh or dict(adam.v)
        low = least(adam.v, bias, s.least)
        size = {k: np.maximum(np.sqrt(v / bias), low[k]) + s.eps for k, v in adam.v.items()}
        live = {k: v > 0 for k, v in adam.v.items()}
        momenta = [{k: (b1 * adam.m[k] / n + (1 - b1) * g[k]) / size[k] for k in g} for g in terms]
        u, born = signs(momenta, live)
        before, adam.m = adam.m, {k: u[k] * size[k] for k in u}
        adam.count += 1
        bare = scaled(u, 1 / (1 - b1**adam.count))
        update = adam.with_decay(bare, x)
        if kind == "lamb":
            for k in u:
                seen = (adam.m[k] - b1 * before[k]) / (1 - b1)
                fresh[k] = b2 * fresh[k] + (1 - b2) * seen**2
                now = np.sqrt(fresh[k] / (1 - b2**adam.count))
                now = np.maximum(now, low[k]) + s.eps
                aged = rows(k, size[k] / now).mean(1, where=rows(k, live[k]))
                norms = [np.sqrt((rows(k, tree[k]) ** 2).sum(1)) for tree in (bare, update)]
                share = np.minimum(norms[0] / norms[1], 1)
                wanted = (share * aged + 1 - share).clip(0.5, 4)
                factor[k] = np.clip(wanted, 0.9 * factor[k], 1.1 * factor[k])
                trust = adam.average[k] / (1 - 0.9**s.warmup) * factor[k]
                update[k] = update[k] * per_row(k, trust, update[k])
        for k in u:
            adam.v[k] = np.where(born[k], bias * low[k] ** 2, adam.v[k])
        x = {k: x[k] - rate * update[k] for k in x}
        found.append(x)
    return found, signs.ties


def zero_one(
    problem: Problem, s: Settings, variance, exchanges, full: tuple = ()
) -> tuple[list[dict], int]:
    """0/1 Adam from the first step on: `variance` and `exchanges`, [steps], say in which steps the
    second moment is updated, and after which replicas exchange."""
    n, b1, b2 = problem.n, s.b1, s.b2
    zero = {k: np.zeros_like(leaf) for k, leaf in problem.start.items()}
    x, own, m, v = problem.start, [problem.start] * n, [zero] * n, zero
    signs, found, moments, rates = Signs(s, x, n, full), [], 0, np.zeros(2)
    for step in range(s.steps):
        g = [clipped(problem.gradient(step, i, own[i]), s.clip) for i in range(n)]
        if variance[step]:
            mean = total([scaled(g[i], problem.shares(step)[i]) for i in range(n)])
            v, moments = {k: b2 * v[k] + (1 - b2) * mean[k] ** 2 for k in v}, moments + 1
        bias = 1 - b2**moments
        low, rate, c1 = least(v, bias, s.least), s.rate_at(step), 1 - b1 ** (step + 1)
        size = {k: np.maximum(np.sqrt(v[k] / bias), low[k]) + s.eps for k in v}
        for i in range(n):
            m[i] = {k: b1 * m[i][k] + (1 - b1) * g[i][k] for k in v}
            own[i] = {
                k: own[i][k]
                - rate * (m[i][k] / c1 / size[k] + s.decay * problem.decays[k] * own[i][k])
                for k in v
            }
        rates += rate, rate / c1
        if exchanges[step]:
            bare = {k: x[k] * (1 - s.decay * problem.decays[k] * rates[0]) for k in x}
            live = {k: v[k] > 0 for k in v}
            terms = [
                {k: np.where(live[k] | (m[i][k] != 0), (bare[k] - own[i][k]) / n, 0) for k in x}
                for i in range(n)
            ]
            moved, born = signs(terms, live)
            x = {k: bare[k] - moved[k] for k in x}
            m = [
                {k: np.where(live[k], moved[k] * size[k] / rates[1], m[i][k]) for k in x}
                for i in range(n)
            ]
            v = {k: np.where(born[k], bias * low[k] ** 2, v[k]) for k in v}
            own, rates = [x] * n, np.zeros(2)
        found.append(x)
    return found, signs.ties


def local(
    problem: Problem, s: Settings, kind: str, *, code: str = "", overlap: bool = False,
    fragments: int = 1, by_tokens: bool = False, moments: bool = False,
) -> tuple[list[dict], int]:  # fmt: skip
    """Local SGD or DiLoCo, after a warm-up by the mean; and numbers that fp32 may round otherwise.

    code: of what replicas have moved; "" = fp32. overlap: an exchange arrives a step later, and
    replicas keep what they have moved meanwhile. fragments: layer by layer in turn, the first with
    what is outside of the layers. by_tokens: replicas weigh by the tokens that they had since the
    last exchange, and do nothing without. moments: exchanges average Adam's.
    """
    n, x = problem.n, problem.start
    tokens = np.zeros(n)
    own, adams = [x] * n, [Adam(s, problem) for _ in range(n)]
    trace, found = {k: np.zeros_like(leaf) for k, leaf in x.items()}, []
    exchange = {(k, f): Coded(s, x, n, code) for k in x for f in range(fragments)} if code else {}

    def exchanged(before: list, chosen, due) -> dict:
        """Shared parameters after an exchange of what `before` has moved; `own` goes on from it."""
        new, weights = dict(x), np.full(n, 1 / n)
        if by_tokens and not tokens.any():
            return new  # and nobody has moved
        if by_tokens:
            weights = tokens / tokens.sum()
        for name in "mv" * moments:
            mean = {
                k: sum(w * getattr(adam, name)[k] for w, adam in zip(weights, adams, strict=True))
                for k in x
            }
            for adam in adams:
                setattr(adam, name, mean)
        for k in x:
            for f in chosen:
                layers = slice(f, None, fragments)
                if not k.startswith("blocks/"):
                    layers = slice(None)
                    if f:
                        continue
                terms = [w * (x[k] - each[k]) for w, each in zip(weights, before, strict=True)]
                if code:
                    moved = exchange[k, f].part(k, [term[layers] for term in terms], layers)
                else:
                    moved = sum(terms)[layers]
                if kind == "diloco" and due == f:
                    trace[k][layers] = s.outer_momentum * trace[k][layers] + moved
                    moved = s.outer_rate * (moved + s.outer_momentum * trace[k][layers])
                new[k] = new[k].copy()
                new[k][layers] = x[k][layers] - moved
                for i in range(n):
                    since = own[i][k][layers] - before[i][k][layers]
                    own[i] = own[i] | {k: own[i][k].copy()}
                    own[i][k][layers] = new[k][layers] + since
        return new

    for step in range(s.steps):
        rate = s.rate_at(step)
        if step < s.warmup:
            g = clipped(total(shares_at(problem, step, x)), s.clip)
            own = [adams[i].step(g, own[i], rate) for i in range(n)]
            x = own[0]
            found.append(x)
            continue
        before, last = list(own), step == s.steps - 1
        for i in range(n):
            if by_tokens and not problem.tokens[step][i]:
                continue
            g = clipped(problem.gradient(step, i, own[i]), s.clip)
            own[i] = adams[i].step(g, own[i], rate)
        due = due_after(step if overlap else step + 1, s, fragments)
        if overlap and due is not None:
            x = exchanged(before, {due}, due)
            tokens[:] = 0
        tokens += problem.tokens[step]
        if last and overlap:
            due = due_after(step + 1, s, fragments)
        if last or (due is not None and not overlap):
            before = list(own)
            x = exchanged(before, range(fragments) if last else {due}, due)
            tokens[:] = 0
        found.append(x)
    return found, sum(each.ties for each in exchange.values())


def due_after(steps: int, s: Settings, fragments: int) -> int | None:
    """The fragment whose round is complete."""
    apart, done = s.every // fragments, steps - s.warmup
    return done // apart % fragments if done > 0 and done % apart == 0 else None
