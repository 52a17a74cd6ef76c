"""Hardware of one's own: a JSON file with a chip, what it reaches, and how devices are joined.

    {"name": "h300", "base": "h100", "flops": {"bfloat16": 2e15}, "hbm_bytes": 309237645312,
     "calibration": {"products": 0.6}}

    name         what `--machine` calls it: h300:128x8
    base         a chip that all that is not given is taken from: a name of `--machine` or a key of
                 `hardware.CHIPS`. Without it, all fields of `hardware.Chip` are needed that have no
                 default; `calibration` then starts from the shares of `llmx.aot`
    flops        by type; those that are given replace the base's, one by one
    others       fields of `hardware.Chip` with its units
    usable_bytes of a device, that a program may use; left out, the base's share of `hbm_bytes`
    calibration  fields of `gemm.Calibration`; `table`: [M, N, K, dtype, share of the peak] each
    rates        fields of `links.Rates`, of one device; left out, as `llmx.aot` assumes
    measured     who measured it: any values, shown and not used

`python -m llmx.plan calibrate` writes such a file.
"""

import dataclasses
import difflib
import json
import math
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llmx.aot import links, topologies
from llmx.plan import calibrations, gemm
from llmx.plan.gemm import Calibration, Core
from llmx.runtime import hardware
from llmx.runtime.hardware import Chip

SHARED = "memory"  # the topology of CPU devices: all are in one memory
TOPOLOGIES = ("torus_2d", "torus_3d", "switch", "pair", SHARED)
USABLE = 0.98  # of a device's memory without a base
_OTHERS = ("name", "base", "usable_bytes", "calibration", "rates", "measured")
_Values = typing.TypeVar("_Values")
_SHARES = ("products", "memory", "attention", "cudnn", "in_steps", "unaligned", "links",
           "network", "share")  # fmt: skip
_FLOPS = sorted({name for chip in hardware.CHIPS.values() for name in chip.flops})
# Per second, of any device: less is in another unit.
_RATES, _LEAST_RATE = ("flops", "hbm_bandwidth", "link_bandwidth", "network_bandwidth"), 1e6
_MOST = 1e30  # of any number
# Of memory: less is in GB, not in bytes.
_BYTES, _LEAST_BYTES = ("hbm_bytes", "usable_bytes"), 2**20
_MAY_BE_ZERO = ("start", "host", "collective", "hop", "network_hop", "num_links", "link_bandwidth",
                "fresh", "units")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a file says."""

    name: str
    base: str | None  # a key of `topologies.TPUS` or `GPUS`
    core: Core
    rates: links.Rates
    usable_bytes: int  # of a device
    measured: Mapping[str, Any]

    @property
    def platform(self) -> str:
        """ "tpu", "gpu" or "cpu"."""
        joined = self.core.chip.topology
        if joined == SHARED:
            return "cpu"
        return "tpu" if joined.startswith("torus") else "gpu"


def read(path: str | pathlib.Path) -> Hardware:
    """The hardware of a file. ValueError, naming the file and the value, for what is wrong."""
    if not str(path):
        raise ValueError("hardware file '': name a file")
    path = pathlib.Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"hardware file {path}: {getattr(error, 'strerror', None) or error}: give a file that "
            "`python -m llmx.plan calibrate` wrote, or write one (docs/plan.md)"
        ) from error
    try:
        return of(json.loads(text))
    except RecursionError as error:
        raise ValueError(f"hardware file {path} is nested too deeply: correct it there") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"hardware file {path} is no JSON: {error}: correct it there") from error
    except ValueError as error:
        raise ValueError(f"hardware file {path}: {error}") from error


def _check_sizes(values: Any) -> None:
    """ValueError for a number that no machine has, and that no float holds."""
    if isinstance(values, dict | list):
        for one in values.values() if isinstance(values, dict) else values:
            _check_sizes(one)
    elif isinstance(values, int) and abs(values) > _MOST:
        said = f"of {len(str(values))} digits"
        raise ValueError(f"a number {said}: use at most {_MOST:g}")


def of(values: Any) -> Hardware:
    """The hardware of the file's values. ValueError for what is wrong."""
    if not isinstance(values, dict):
        raise ValueError(f"holds a {type(values).__name__}: write one object, {{...}}")
    _check_sizes(values)
    fields = {field.name for field in dataclasses.fields(Chip)}
    _known("key", values, [*_OTHERS, *sorted(fields - {"name"})])
    name = values.get("name")
    if not isinstance(name, str) or not name.replace("_", "a").isalnum() or name != name.lower():
        raise ValueError(
            f"name={name!r}: write lower case letters, digits and _, as --machine NAME:SHAPE says"
        )
    family, base = _base(values.get("base"))
    chip = _chip(values, fields, base, name)
    core = Core(chip, _calibration(values.get("calibration", {}), chip, base))
    rates = _changed(links.rates_of(chip), values.get("rates", {}), "rates.")
    if not rates.link and chip.topology != SHARED:
        raise ValueError(
            f"num_links={chip.num_links}, link_bandwidth={chip.link_bandwidth:g}: devices of "
            f'topology {chip.topology!r} would send nothing; use more than 0, or give "rates": '
            '{"link": ...}'
        )
    if family is not None:
        all_of = (topologies.TPUS | topologies.GPUS)[family].hbm_bytes
        share = all_of / base.device_hbm_bytes
    else:
        share = USABLE
    usable = values.get("usable_bytes", int(share * chip.device_hbm_bytes))
    _check("usable_bytes", usable, int)
    # A v5p has more for programs than the 95 GiB that are published of it.
    if usable > (most := math.ceil(max(1.0, share) * chip.device_hbm_bytes)):
        raise ValueError(
            f"usable_bytes={usable} is more than a device's memory, {most}: leave it out, or "
            "correct hbm_bytes"
        )
    measured = values.get("measured", {})
    _check("measured", measured, dict)
    return Hardware(name, family, core, rates, usable, measured)


def to_text(found: Hardware) -> str:
    """A file that says all of it, and needs no base; each row of a table on a line."""
    text = json.dumps(to_json(found), indent=1)
    return re.sub(r"\[\s+([^][{}]*?)\s+\]", _on_one_line, text) + "\n"


def _on_one_line(row: re.Match) -> str:
    return "[" + re.sub(r"\s+", " ", row[1]) + "]"


def to_json(found: Hardware) -> dict[str, Any]:
    """The values of `to_text`."""
    chip = {name: value for name, value in vars(found.core.chip).items() if name != "name"}
    calibration = dataclasses.asdict(found.core.calibration)
    for name, value in calibration.items():
        if isinstance(value, tuple):
            calibration[name] = [list(row) for row in value]
    return {
        "name": found.name, **({} if found.base is None else {"base": found.base}), **chip,
        "usable_bytes": found.usable_bytes, "calibration": calibration,
        "rates": dataclasses.asdict(found.rates), "measured": dict(found.measured),
    }  # fmt: skip


def _known(what: str, given: Iterable[str], known: list[str]) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{what} {key!r} is unknown: {hint}there are {', '.join(known)}")


def _base(name: Any) -> tuple[str | None, Chip | None]:
    """The family and the chip of a base; None where there is none."""
    if name is None:
        return None, None
    families = {key: machine.chip for key, machine in (topologies.TPUS | topologies.GPUS).items()}
    if isinstance(name, str) and name in families:
        return name, hardware.CHIPS[families[name]]
    if isinstance(name, str) and name in hardware.CHIPS:
        family = next((key for key, chip in families.items() if chip == name), None)
        return family, hardware.CHIPS[name]
    raise ValueError(
        f"base={name!r} is unknown: use one of {', '.join([*families, *hardware.CHIPS])}, or "
        "leave it out and give all fields"
    )


def _chip(values: Mapping[str, Any], fields: set[str], base: Chip | None, name: str) -> Chip:
    given = {key: values[key] for key in fields - {"name"} if key in values}
    if base is None:
        needed = [
            field.name for field in dataclasses.fields(Chip)
            if field.default is dataclasses.MISSING and field.name not in {*given, "name"}
        ]  # fmt: skip
        if needed:
            raise ValueError(
                f"{', '.join(needed)}: missing, and there is no base: give them, or a base that "
                'has them, e.g. "base": "h100"'
            )
    _check_fields(given, Chip, "")
    if (joined := given.get("topology", SHARED)) not in TOPOLOGIES:
        raise ValueError(f"topology={joined!r}: use one of {', '.join(TOPOLOGIES)}")
    _known("type in flops", given.get("flops", {}), _FLOPS)
    flops = (base.flops if base else {}) | given.get("flops", {})
    if "bfloat16" not in flops:
        raise ValueError(
            f"flops={flops} without bfloat16, which stands for all types that are not given: add it"
        )
    return dataclasses.replace(base, **given | {"flops": flops, "name": name}) if base else Chip(
        name=name, **given
    )  # fmt: skip


def _calibration(given: Any, chip: Chip, base: Chip | None) -> Calibration:
    key = next((key for key, one in hardware.CHIPS.items() if one is base), None)
    start = calibrations.core_of(key).calibration if key else calibrations.shares_of(chip)
    if isinstance(given, dict):
        rows = {
            name: _rows(name, given[name], kind) for name, kind in _TABLES.items() if name in given
        }
        given = given | rows
    return _changed(start, given, "calibration.")


_TABLES: dict[str, type] = {
    "table": gemm.Measured, "streamed": gemm.Streamed, "attended": gemm.Attended,
}  # fmt: skip


def _rows(name: str, rows: Any, kind: type) -> tuple[Any, ...]:
    """Rows of a table as `kind`, a NamedTuple."""
    types_of = typing.get_type_hints(kind)
    _check(f"calibration.{name}", rows, list)
    for number, row in enumerate(rows):
        where = f"calibration.{name}[{number}]"
        if not isinstance(row, list) or len(row) != len(types_of):
            raise ValueError(f"{where}={row!r}: write [{', '.join(types_of)}]")
        for (column, of_column), value in zip(types_of.items(), row, strict=True):
            _check(f"{where}, {column}", value, of_column, column)
        if "dtype" in types_of and row[list(types_of).index("dtype")] not in gemm.DTYPE_BYTES:
            raise ValueError(f"{where}={row!r}: dtype is one of {', '.join(gemm.DTYPE_BYTES)}")
    found = tuple(kind(*row) for row in rows)
    return tuple(sorted(found)) if kind is gemm.Streamed else found  # between them it interpolates


def _changed(start: _Values, given: Any, prefix: str) -> _Values:
    """A dataclass with the values that are given."""
    _check(prefix.rstrip("."), given, dict)
    _known(f"{prefix.rstrip('.')} key", given, [field.name for field in dataclasses.fields(start)])
    _check_fields(given, type(start), prefix)
    return dataclasses.replace(start, **given)


def _check_fields(given: Mapping[str, Any], kind: type, prefix: str) -> None:
    hints = typing.get_type_hints(kind)
    for key, value in given.items():
        _check(f"{prefix}{key}", value, hints[key], key)


_SAID: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: isinstance(value, int)),
    float: ("a number", lambda value: isinstance(value, (int, float)) and math.isfinite(value)),
    str: ("a text", lambda value: isinstance(value, str)),
    list: ("a list", lambda value: isinstance(value, (list, tuple))),
    dict: ("an object, {...}", lambda value: isinstance(value, dict)),
    tuple: ("a list", lambda value: isinstance(value, tuple)),
}


def _check(name: str, value: Any, hint: Any, key: str = "") -> None:
    """ValueError unless a value has the type of its field, and is in its range."""
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    said, right = _SAID[typing.get_origin(hint) or hint]
    if isinstance(value, float) and hint in (int, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: write {said} that is finite")
    if isinstance(value, float) and hint is int:
        raise ValueError(f"{name}={value!r}: write {said}, without point and exponent")
    if isinstance(value, bool) or not right(value):
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}: write {said}")
    if isinstance(value, dict):
        if typing.get_origin(hint) is dict:
            for inner, one in value.items():
                _check(f"{name}[{inner!r}]", one, typing.get_args(hint)[1], key)
        return
    if not isinstance(value, (int, float)):
        return
    least = 0 if key in _MAY_BE_ZERO else None
    if value < 0 or (value == 0 and least is None):
        raise ValueError(f"{name}={value!r}: use {'0 or more' if least == 0 else 'more than 0'}")
    if key in _RATES and 0 < value < _LEAST_RATE:
        raise ValueError(f"{name}={value!r}: use at least {_LEAST_RATE:g} in a second")
    if (key or name) in _BYTES and value < _LEAST_BYTES:
        raise ValueError(f"{name}={value!r}: write bytes, at least {_LEAST_BYTES:,}")
    if key in _SHARES and value > 1 and "rates" not in name:
        raise ValueError(f"{name}={value!r} is a share: use at most 1")
