"""Predictions of an exported model of clicks in one process, without jax.

    model = online.open_model("exports/day3")
    model.click(dense_BF, ids_BI)                        # probabilities [B]

The same functions as `dlrm`, `dcn` and `din`, in NumPy and fp32. Letters: B records, F numbers, I
ids of all features side by side, L ids of a history, N vectors of a record, D width of a row.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping

import numpy as np

from llmx.model.recommender import config as config_lib
from llmx.model.recommender.config import RecommenderConfig
from llmx.tables import online
from llmx.tables.online import Online

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model of clicks with its tables."""

    config: RecommenderConfig
    params: Arrays
    tables: Online

    def logits(
        self, dense_BF: np.ndarray, ids_BI: np.ndarray, weights_BJ: np.ndarray | None = None
    ) -> np.ndarray:
        """The log odds of a click, fp32 [B]; -1 in ids stands for none.

        weights_BJ: of the ids of the features that have some, side by side.
        """
        embedded, present, first, first_weight = {}, {}, 0, 0
        numbers = dict(zip(self.config.features, self.config.weights, strict=False))
        if any(numbers.values()) != (weights_BJ is not None):
            having = [name for name, number in numbers.items() if number]
            raise ValueError(
                f"ids of {', '.join(having) or 'no feature'} have weights: give weights_BJ where "
                "there are some, and only there"
            )
        features = self.tables.export.features
        sizes = {
            "dense_BF": (np.shape(dense_BF), self.config.num_dense),
            "ids_BI": (np.shape(ids_BI), sum(one.length for one in features.values())),
        }
        if weights_BJ is not None:
            sizes["weights_BJ"] = np.shape(weights_BJ), sum(numbers.values())
        for what, (shape, columns) in sizes.items():
            if len(shape) != 2 or shape[1] != columns or shape[0] != np.shape(ids_BI)[0]:
                raise ValueError(
                    f"{what} has the shape {list(shape)}: a row for each record, and {columns} "
                    f"columns: {', '.join(features) if what == 'ids_BI' else 'as the model has'}"
                )
        for name, feature in features.items():
            own_BL, weights_BL = np.asarray(ids_BI)[:, first : first + feature.length], None
            first += feature.length
            if number := numbers.get(name, 0):
                weights_BL = weights_BJ[:, first_weight : first_weight + number]
                first_weight += number
            embedded[name] = self.tables.bags(name, own_BL, weights_BL)
            present[name] = own_BL >= 0
        dense_BF = np.asarray(dense_BF, np.float32)
        return _LOGITS[self.config.name](self.config, self.params, dense_BF, embedded, present)

    def click(
        self, dense_BF: np.ndarray, ids_BI: np.ndarray, weights_BJ: np.ndarray | None = None
    ) -> np.ndarray:
        """The probability of a click, fp32 [B]; see `logits`."""
        return _sigmoid(self.logits(dense_BF, ids_BI, weights_BJ))


def open_model(folder: str | os.PathLike, *, verify: bool = False) -> Model:
    """Opens an export of a model of clicks. Raises ValueError for one of another model."""
    tables = online.open_export(folder, verify=verify)
    saved = tables.export.manifest["model"].get("recommender", {})
    if not saved.get("name"):
        raise ValueError(
            f"{folder} has tables of a language model: online.open_export looks their rows up"
        )
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()}
    return Model(RecommenderConfig(**values), tables.export.dense, tables)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # is 0 then
        return 1 / (1 + np.exp(-x))


def _relu(x: np.ndarray, params: Arrays, name: str) -> np.ndarray:
    return np.maximum(x, 0)


def _prelu(x: np.ndarray, params: Arrays, name: str) -> np.ndarray:
    return np.maximum(x, 0) + params[f"{name}.slope"] * np.minimum(x, 0)


def _linear(params: Arrays, name: str, x: np.ndarray) -> np.ndarray:
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


def _layers(params: Arrays, name: str, x: np.ndarray, number: int, activation: Callable):
    for at in range(number):
        x = activation(_linear(params, f"{name}.{at}", x), params, f"{name}.{at}")
    return x


def _bottom(config: RecommenderConfig, params: Arrays, dense_BF: np.ndarray) -> np.ndarray:
    return _layers(params, "bottom", dense_BF, len(config.bottom), _relu)


def _dlrm(config: RecommenderConfig, params: Arrays, dense_BF, embedded, present) -> np.ndarray:
    vectors, whole = list(embedded.values()), []
    if dense_BF.shape[1]:
        whole = [_bottom(config, params, dense_BF)]
        vectors = whole + vectors
    vectors_BND = np.stack(vectors, axis=1)
    products_BNN = vectors_BND @ vectors_BND.swapaxes(1, 2)
    lower = np.tril_indices(len(vectors), -1)
    both = np.concatenate([*whole, products_BNN[:, *lower]], axis=1)
    hidden = _layers(params, "top", both, len(config.top), _relu)
    return _linear(params, "logit", hidden)[:, 0]


def _dcn(config: RecommenderConfig, params: Arrays, dense_BF, embedded, present) -> np.ndarray:
    x0 = np.concatenate([_bottom(config, params, dense_BF), *embedded.values()], axis=1)
    crossed = x0
    for at in range(config.cross_layers):
        down = crossed @ params[f"cross.{at}.down"] if config.cross_rank else crossed
        crossed = x0 * _linear(params, f"cross.{at}", down) + crossed
    if config.structure == "stacked":
        hidden = _layers(params, "top", crossed, len(config.top), _relu)
        return _linear(params, "logit", hidden)[:, 0]
    hidden = _layers(params, "top", x0, len(config.top), _relu)
    return _linear(params, "logit", np.concatenate([crossed, hidden], axis=1))[:, 0]


def _din(config: RecommenderConfig, params: Arrays, dense_BF, embedded, present) -> np.ndarray:
    candidates = config_lib.pairs(config)
    activation = lambda x, params, name: _sigmoid(x)  # noqa: E731
    vectors = []
    for name, rows in embedded.items():
        if name not in candidates:
            vectors.append(rows)
            continue
        one = np.broadcast_to(embedded[candidates[name]][:, None], rows.shape)
        pairs = np.concatenate([one, rows, one - rows, one * rows], axis=-1)
        hidden = _layers(params, f"attention.{name}", pairs, len(config.attention), activation)
        weights_BL = _linear(params, f"attention.{name}.last", hidden)[..., 0]
        weights_BL = np.where(present[name], weights_BL, 0)
        vectors.append(np.einsum("BL,BLD->BD", weights_BL, rows))
    x = np.concatenate([_bottom(config, params, dense_BF), *vectors], axis=1)
    hidden = _layers(params, "top", x, len(config.top), _prelu)
    return _linear(params, "logit", hidden)[:, 0]


_LOGITS: Mapping[str, Callable] = {"dlrm": _dlrm, "dcn": _dcn, "din": _din}
