"""Malformed inputs: python scripts/fuzz.py [--inputs N] [--seed S] [--workers K] [--only TARGET]

Each input is a small valid file that a mutation spoils: flipped bits, cut or repeated spans, other
types and sizes in JSON, deep nesting, bytes that are no UTF-8, names that lead out of a folder.
The function that a user's command calls loads it. It may succeed, or raise ValueError with a text
that names the file; anything else is a finding: another exception, more than LIMIT_SECONDS or
LIMIT_BYTES, a file written outside the input's own folder. An input is a function of seed and
number: --only TARGET --first N --inputs 1 repeats one. Exit code 1 if there is a finding.

The target `configs` draws whole configs (scripts/draw_configs.py): of those that are accepted the
step is traced. It takes seconds for each and no part in a run over all targets: --only configs.
"""

import argparse
import collections
import contextlib
import copy
import io
import json
import mmap
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Callable
from typing import Any

LIMIT_SECONDS = 10
LIMIT_BYTES = 1 << 30  # above what the process took before
MAX_MESSAGE = 20_000

# ---- mutations

_NUMBERS = (0, -1, 1, 2, 255, 65536, 2**31, 2**32 + 1, 10**9, 2**63, 10**18, 10**30, -(10**12))
_FLOATS = (0.0, -0.5, 1e-300, 1e300, float("inf"), float("nan"))
_TEXTS = (
    "", "a", "\0", "../../outside", "/etc/passwd", "x" * 5000, "\ud800", "1e999", "null",
    "shards:/", "~nobody/x", "é" * 300, "a\nb",
)  # fmt: skip
_BYTES = (
    b"\0" * 64, b"\xff\xfe", b"[" * 5000, b'{"a":' * 3000, b"9" * 6000, b"\xc3", b"\n", b'"', b"}",
    b"NaN", b"-1", b"1e999", b"\\u0000", b"\xf0\x9f\x98\x80", b"../",
)  # fmt: skip


def spoil_bytes(rng: random.Random, raw: bytes) -> bytes:
    """`raw` with one to four changes anywhere."""
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randint(0, len(raw)), rng.randint(1, max(len(raw) // 3, 1))
        kind = rng.randrange(7)
        if kind == 0 and raw:
            bits = bytearray(raw)
            for _ in range(rng.randint(1, 8)):
                bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(8)
            raw = bytes(bits)
        elif kind == 1:
            raw = raw[:at]
        elif kind == 2:
            raw = raw[:at] + raw[at + size :]
        elif kind == 3:
            raw = raw[:at] + raw[at : at + size] * rng.randint(2, 5) + raw[at:]
        elif kind == 4:
            raw = raw[:at] + rng.choice(_BYTES) + raw[at:]
        elif kind == 5:
            raw = raw[:at] + rng.randbytes(size % 64) + raw[at + size % 64 :]
        else:
            number = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            raw = raw[:at] + struct.pack("<Q", number) + raw[at + 8 :]
    return raw


def _random_value(rng: random.Random) -> Any:
    value = rng.choice((
        None, True, False, [], {}, [[]], {"": None}, rng.choice(_NUMBERS), rng.choice(_FLOATS),
        rng.choice(_TEXTS), rng.choice(_NUMBERS), rng.choice(_TEXTS),
    ))  # fmt: skip
    for _ in range(rng.choice((0, 0, 0, 1, 3, 200))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def spoil_json(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value with one to three values replaced, removed, renamed or repeated."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 3)):
        places, waiting = [], [value]
        while waiting:
            node = waiting.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node))
            places += [(node, key) for key in keys]
            waiting += [
                node[key] for key in keys if isinstance(node[key], dict | list) and node[key]
            ]
        if not places:
            return _random_value(rng)
        node, key = rng.choice(places)
        kind = rng.randrange(6)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[rng.choice(_TEXTS)] = node.pop(key)
        elif kind == 2 and isinstance(node, list):
            times = rng.choice((1, 3, 1000))
            node += [node[key]] * (times if len(places) < 1000 else 1)  # else no memory holds it
        elif kind == 3 and isinstance(node[key], int | float):
            node[key] = rng.choice((*_NUMBERS, *_FLOATS, -node[key], node[key] + 1, str(node[key])))
        else:
            node[key] = _random_value(rng)
    return _random_value(rng) if rng.random() < 0.02 else value


def spoil_json_file(rng: random.Random, raw: bytes, seal: Callable[[Any], Any] | None) -> bytes:
    """The file with other values, or half of the time with other bytes.

    `seal` renews the checksum inside, without which nothing behind its check would be reached.
    """
    if rng.random() < 0.35:
        return spoil_bytes(rng, raw)
    value = spoil_json(rng, json.loads(raw))
    if seal is not None and rng.random() < 0.9:
        with contextlib.suppress(Exception):
            value = seal(value)
    text = json.dumps(value)
    if rng.random() < 0.05:
        text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    return text.encode("utf-8", "surrogatepass")


# ---- targets: each has `make`, which writes valid files once, and `load`, which reads a folder


def _fill(files: dict[str, bytes], folder: pathlib.Path) -> None:
    for name, raw in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def _files_in(folder: pathlib.Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


class Target:
    """A kind of input. `files` are valid; `spoiled` of them are changed."""

    limits = 1  # of time and memory, in times of those of a file

    def __init__(self, folder: pathlib.Path):
        self.make(folder)
        self.files = _files_in(folder)

    def make(self, folder: pathlib.Path) -> None:
        raise NotImplementedError

    def spoil(self, rng: random.Random) -> dict[str, bytes]:
        files = dict(self.files)
        name = rng.choice(sorted(files))
        files[name] = spoil_bytes(rng, files[name])
        return files

    def load(self, folder: pathlib.Path, rng: random.Random) -> None:
        raise NotImplementedError

    def names(self, message: str, folder: pathlib.Path) -> bool:
        """Whether an error names what is wrong."""
        return str(folder) in message


def _open_dataset(folder: pathlib.Path, source: str, **settings: Any) -> None:
    from llmx.data import config, dataset

    made = config.DataConfig(sources=(source,), held_out=0.0, **settings)
    opened = dataset.open_dataset(
        made, sequence_length=4, seed=0, cache_dir=folder / "cache", log=lambda text: None
    )
    for step in range(3):
        opened.train_rows(step, range(2), 2)


class Jsonl(Target):
    """JSONL files, opened as a source of data."""

    def make(self, folder):
        texts = ["some text", "é中 and more", "x" * 300, "line\nbreak", "\U0001f600 end"]
        lines = [json.dumps({"text": text, "id": i, "more": [1, {"a": None}]}) for i, text in
                 enumerate(texts)]  # fmt: skip
        (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "b.txt").write_text("plain text\n" * 5)

    def spoil(self, rng):
        files = dict(self.files)
        if rng.random() < 0.4:
            lines = files["a.jsonl"].splitlines()
            at = rng.randrange(len(lines))
            lines[at] = spoil_json_file(rng, lines[at], None)
            files["a.jsonl"] = b"\n".join(lines)
            return files
        return super().spoil(rng)

    def load(self, folder, rng):
        _open_dataset(folder, str(folder), skip_bad=rng.random() < 0.3)


class Parquet(Target):
    """A Parquet file, opened as a source of data."""

    def make(self, folder):
        import pyarrow
        from pyarrow import parquet

        texts = [f"text {i} " * (i % 7 + 1) for i in range(40)]
        table = pyarrow.table({"text": texts, "id": list(range(40))})
        for number, options in enumerate((
            {}, {"use_dictionary": False, "compression": "zstd"}, {"data_page_version": "2.0"},
            {"compression": "gzip", "row_group_size": 7},
        )):  # fmt: skip
            parquet.write_table(table, folder / f"{number}.parquet", **options)

    def spoil(self, rng):
        name = rng.choice(sorted(self.files))
        return {"a.parquet": spoil_bytes(rng, self.files[name])}

    def load(self, folder, rng):
        from llmx.data import documents

        # The branch of large column chunks too.
        documents._SMALL_CHUNK_BYTES = rng.choice((0, 32 << 20))
        documents._MAX_PAGE_BYTES = rng.choice((100, 256 << 20))
        _open_dataset(folder, str(folder / "a.parquet"), skip_bad=rng.random() < 0.3)


class Shards(Target):
    """A folder of token shards, finished or not."""

    def make(self, folder):
        from llmx.data import __main__ as command

        (folder / "a.txt").write_text("some text to read\n" * 9)
        (folder / "b.txt").write_text("more\n" * 9)
        out = ["--output", str(folder / "out"), "--shard-tokens", "60"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert command.main(["--source", f"{folder}/*.txt", *out]) == 0

    def spoil(self, rng):
        from llmx.data import shards

        files = dict(self.files)
        if rng.random() < 0.5:
            files["out/index.json"] = spoil_json_file(rng, files["out/index.json"], shards.seal)
        elif rng.random() < 0.5:
            index = json.loads(files.pop("out/index.json"))
            progress = {"identity": index["identity"], "shards": index["shards"][:1],
                        "position": dict.fromkeys(("file", "offset", "record"), 0),
                        "skipped": {}}  # fmt: skip
            raw = json.dumps(shards.seal(progress)).encode()
            files["out/progress.json"] = spoil_json_file(rng, raw, shards.seal)
        else:
            name = rng.choice([name for name in files if name.startswith("out/shard")])
            files[name] = spoil_bytes(rng, files[name])
            if rng.random() < 0.8:  # with the checksum that it now has
                import hashlib

                index = json.loads(files["out/index.json"])
                stem, kind = pathlib.PurePath(name).stem, pathlib.PurePath(name).suffix[1:]
                for entry in index["shards"]:
                    if entry["name"] == stem:
                        entry["sha256"][kind] = hashlib.sha256(files[name]).hexdigest()
                        size = 16 if kind == "documents" else 2
                        entry[kind] = len(files[name]) // size
                files["out/index.json"] = json.dumps(shards.seal(index)).encode()
        return files

    def load(self, folder, rng):
        if (folder / "out" / "progress.json").exists():
            from llmx.data import build, tokenizers

            recipe = build.make_recipe(
                [f"{folder}/*.txt"], tokenizer=tokenizers.ByteTokenizer(), text_key="text",
                skip_bad=False, shard_tokens=60,
            )  # fmt: skip
            build.write_shards(folder / "out", recipe, report=lambda *counts: None)
        _open_dataset(folder, f"shards:{folder}/out")


class Tokenizer(Target):
    """A tokenizer.json, loaded and used."""

    def make(self, folder):
        from llmx.data import tokenizers

        texts = [b"one two three two one", "é中".encode()]
        tokenizers.train(texts, vocab_size=280).save(folder / "tokenizer.json")

    def spoil(self, rng):
        raw = self.files["tokenizer.json"]
        return {"tokenizer.json": spoil_json_file(rng, raw, None)}

    def load(self, folder, rng):
        from llmx.data import tokenizers

        loaded = tokenizers.load(folder)
        loaded.decode(loaded.encode("one two é \U0001f600 <|endoftext|>"))


class HuggingFace(Target):
    """A checkpoint of Hugging Face: config.json, index and safetensors."""

    def make(self, folder):
        import numpy as np

        from llmx.checkpoint import hf, hf_formats
        from llmx.model import families
        from llmx.sharding import trees

        for family in hf_formats.FORMATS:
            own = dict(rope_dim=2) if families.FAMILIES[family].get("kv_latent") else {}
            model = families.preset(family, vocab_size=9, width=8, num_layers=2, num_heads=2,
                                    num_kv_heads=2, head_dim=4, mlp_dim=32, max_positions=8,
                                    vocab_multiple=1, **own)  # fmt: skip
            flat = {
                path: np.zeros(shape, np.float32)
                for row in hf_formats.rows(model)
                for path, shape in hf_formats.our_shapes(row, model).items()
            }  # fmt: skip
            flat |= {
                path: np.zeros(shape, np.float32)
                for path, shape in hf_formats.unwritten(model).items()
            }
            for name, size in (("one", 10**9), ("many", 500)):
                hf.export(trees.nest(flat), model, folder / f"{family}-{name}", shard_bytes=size)

    def spoil(self, rng):
        kind = rng.choice(sorted({name.split("/")[0] for name in self.files}))
        files = {name.split("/")[1]: raw for name, raw in self.files.items()
                 if name.startswith(f"{kind}/")}  # fmt: skip
        jsons = [name for name in files if name.endswith(".json")]
        name = rng.choice(jsons if rng.random() < 0.6 else sorted(files))
        if name.endswith(".json"):
            files[name] = spoil_json_file(rng, files[name], None)
            return files
        length = int.from_bytes(files[name][:8], "little")
        header, body = files[name][8 : 8 + length], files[name][8 + length :]
        if rng.random() < 0.6:
            header = spoil_json_file(rng, header, None)
            files[name] = len(header).to_bytes(8, "little") + header + body
        else:
            files[name] = spoil_bytes(rng, files[name])
        return files

    def load(self, folder, rng):
        from llmx.checkpoint import hf

        hf.load(folder)


class Checkpoint(Target):
    """The metadata of a checkpoint and the names in its directory."""

    def make(self, folder):
        from llmx.checkpoint import checksums

        array = {"type": "array", "dtype": "float32", "checksum": 7}
        leaves = {
            "params/embedding": array | {"shape": [8, 4]},
            "params/blocks/mlp": array | {"shape": [2, 4]},
            "stale/flight/x": array | {"shape": [2]},
            "sync/rate": {"type": "float", "value": 0.5},
            "step": {"type": "int", "value": 12},
        }  # fmt: skip
        document = {"format": 2, "step": 12, "leaves": leaves, "meta": {"loader": {"step": 12}},
                    "renamed": 0, "order": [1, 0, -1]}  # fmt: skip
        (folder / "checkpoints" / "12" / "meta").mkdir(parents=True)
        sealed = json.dumps(checksums.seal(document))
        (folder / "checkpoints" / "12" / "meta" / "metadata").write_text(sealed)

    def spoil(self, rng):
        from llmx.checkpoint import checksums

        ((name, raw),) = self.files.items()
        files = {name: spoil_json_file(rng, raw, lambda value: checksums.seal(value["document"]))}
        for _ in range(rng.randint(0, 3)):
            stray = rng.choice(("007", "٣", "1e3", "-4", "12.corrupt", "9" * 200, "12 ", "x", "13"))
            files[f"checkpoints/{stray}/meta/metadata"] = rng.choice((raw, b"", b"{}", b"[1]"))
        return files

    def load(self, folder, rng):
        from llmx.checkpoint import checkpointer, manifest

        directory = str(folder / "checkpoints")
        refused = None
        for step in checkpointer.list_steps(directory):
            try:
                checkpointer.read_meta(directory, step)
                document = manifest.read(folder / "checkpoints" / str(step) / "meta" / "metadata")
                for prefix in ("params", "sync"):
                    document.holds(prefix), document.shapes(prefix)
                    document.order.plain_shape("params/blocks/mlp", (len(document.order.slots), 4))
            except ValueError as error:
                refused = error
        if refused:
            raise refused


class Run(Target):
    """The config.json of a work directory."""

    def make(self, folder):
        from llmx import config

        run = config.default()
        run.workdir = str(folder)
        config.save_run(run)

    def spoil(self, rng):
        return {"config.json": spoil_json_file(rng, self.files["config.json"], None)}

    def load(self, folder, rng):
        from llmx import config
        from llmx.config import checks

        checks.resolve(config.load_run(str(folder)), 1)

    def names(self, message, folder):
        return str(folder) in message or message.startswith("the config has ")


class Overrides(Target):
    """Overrides of a config on the command line."""

    def make(self, folder):
        text = "from llmx.config import Config\n\n\ndef get_config():\n    return Config()\n"
        (folder / "config.py").write_text(text)

    def spoil(self, rng):
        return dict(self.files)

    def load(self, folder, rng):
        from llmx import config
        from llmx.config import checks, flags

        known = config.leaf_types(config.Config)
        # Not workdir and such: a path is allowed to be anywhere.
        keys = sorted(key for key in known if "dir" not in key)
        arguments = ["--config", str(folder / "config.py"), "--workdir", str(folder / "run")]
        for _ in range(rng.randint(1, 3)):
            key = rng.choice(keys)
            if rng.random() < 0.1:
                key = spoil_bytes(rng, key.encode()).decode("utf-8", "replace")
            value = rng.choice((
                lambda: str(rng.choice((*_NUMBERS, *_FLOATS))),
                lambda: rng.choice(_TEXTS),
                lambda: json.dumps(_random_value(rng)),
                lambda: rng.choice(_BYTES).decode("utf-8", "replace"),
                lambda: "(" * rng.choice((1, 50, 3000)) + "1",
                lambda: "('a', 3,)", lambda: "(1e999,)", lambda: "1_000", lambda: "True",
            ))()  # fmt: skip
            arguments.append(f"--config.{key}={value}")
        made = flags.parser("llmx.train", "")
        _, run, problems = flags.parse(made, arguments)
        checks.resolve(run, rng.choice((None, 1, 4)), problems=problems)

    def names(self, message, folder):
        return True


class Configs(Target):
    """Configs over all keys, and the traced steps of those that are accepted."""

    limits = 16  # a pipeline with many ticks, on a busy machine

    def make(self, folder):
        pass

    def spoil(self, rng):
        return {}

    def load(self, folder, rng):
        import draw_configs

        arguments = draw_configs.draw(rng, folder)
        (folder / "arguments").write_text("\n".join(arguments))
        draw_configs.trace(arguments, rng.choice(draw_configs.KINDS))

    def names(self, message, folder):
        return True


TARGETS = {
    "overrides": Overrides, "jsonl": Jsonl, "parquet": Parquet, "shards": Shards,
    "tokenizer": Tokenizer, "hf": HuggingFace, "checkpoint": Checkpoint, "run": Run,
    "configs": Configs,
}  # fmt: skip

# ---- one input


class _Writes:
    """Notes files that Python code writes outside a folder."""

    # The position of the path that changes among the arguments of an event.
    _CHANGES: typing.ClassVar = {
        "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.rename": 1, "os.link": 1,
        "os.symlink": 1, "os.truncate": 0, "shutil.rmtree": 0,
    }  # fmt: skip

    def __init__(self):
        self.inside, self.found = "", []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self.inside:
            return
        path = None
        if event == "open" and isinstance(arguments[2], int):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                path = arguments[0]
        elif event in self._CHANGES:
            path = arguments[self._CHANGES[event]]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        real = os.path.realpath(os.fsdecode(path))
        if not f"{real}/".startswith(self.inside) and real != os.devnull:
            self.found.append(f"{event} {real}")


def _memory(field: str) -> int:
    with open("/proc/self/status") as file:
        return int(re.search(rf"{field}:\s+(\d+)", file.read())[1]) << 10


def try_input(target: Target, number: int, seed: int, folder: pathlib.Path, writes: _Writes):
    """(outcome, details): "loads", "refused", or what is wrong."""
    rng = random.Random(f"{seed}/{type(target).__name__}/{number}")
    _fill(target.spoil(rng), folder)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = _memory("VmRSS")
    writes.found, writes.inside = [], f"{os.path.realpath(folder)}/"
    outcome, details = "loads", ""
    try:
        target.load(folder, rng)
    except ValueError as error:
        outcome, message = "refused", str(error)
        if not target.names(message, folder):
            outcome, details = "unnamed", "".join(traceback.format_exception(error)[-3:])
        elif len(message) > MAX_MESSAGE:
            outcome, details = "long message", message[:500]
        elif isinstance(error, UnicodeError):
            outcome, details = "unexplained", "".join(traceback.format_exception(error)[-3:])
    except SystemExit as error:
        outcome, details = ("refused", "") if error.code == 2 else ("exit", repr(error.code))
    except BaseException as error:
        outcome = type(error).__name__
        details = "".join(traceback.format_exception(error)[-4:])[-3000:]
    finally:
        writes.inside = ""
    if (taken := _memory("VmHWM") - before) > LIMIT_BYTES * target.limits:
        return "memory", f"{taken >> 20} MiB\n{details}"
    if writes.found:
        return "writes outside", "\n".join(writes.found[:5])
    return outcome, details


# ---- workers


def work(names: list[str], numbers: list[int], seed: int, scratch: pathlib.Path, now: mmap.mmap):
    """Runs inputs in this forked process and writes one line of JSON for each."""
    with open(scratch / "output", "w") as output:  # libraries print panics and usage
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for name in ("HOME", "TMPDIR"):
        (scratch / name).mkdir(exist_ok=True)
        os.environ[name] = str(scratch / name)
    (scratch / "cwd").mkdir(exist_ok=True)
    os.chdir(scratch / "cwd")
    tempfile.tempdir = None
    made = {}
    for name in dict.fromkeys(names):
        folder = scratch / "valid" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made[name] = TARGETS[name](folder)
    writes = _Writes()
    # A copy that asks for far too much fails here and not on the machine.
    most = max(target.limits for target in made.values())
    limit = _memory("VmSize") + 4 * LIMIT_BYTES * most
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with open(scratch / "results.jsonl", "a") as results:
        for name, number in zip(names, numbers, strict=True):
            folder = scratch / "input"
            folder.mkdir()
            now[:16] = struct.pack("<qd", number, time.monotonic())
            outcome, details = try_input(made[name], number, seed, folder, writes)
            now[:16] = struct.pack("<qd", -1, 0.0)
            left = [
                path for area in ("HOME", "TMPDIR", "cwd") for path in (scratch / area).iterdir()
            ]
            if left and outcome in ("loads", "refused"):
                outcome, details = "writes outside", str(left[0])
            for path in left:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if outcome not in ("loads", "refused"):
                shutil.copytree(folder, scratch.parent / "kept" / f"{name}-{number}", symlinks=True)
            shutil.rmtree(folder)
            results.write(json.dumps([name, number, outcome, details]) + "\n")
            results.flush()


def run_workers(inputs: list[tuple[str, int]], seed: int, workers: int, scratch: pathlib.Path):
    """Results of all inputs as [name, number, outcome, details]."""
    (scratch / "kept").mkdir(parents=True, exist_ok=True)
    running: dict[int, tuple[int, mmap.mmap]] = {}
    parts = {k: inputs[k::workers] for k in range(workers)}
    of_number = {number: name for name, number in inputs}

    def start(k: int) -> None:
        folder = scratch / f"worker-{k}"
        folder.mkdir(exist_ok=True)
        shutil.rmtree(folder / "input", ignore_errors=True)
        done = _results(folder)
        left = parts[k][len(done) :]
        if not left:
            return
        now = mmap.mmap(-1, 16)
        now[:16] = struct.pack("<qd", -1, 0.0)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work([name for name, _ in left], [n for _, n in left], seed, folder, now)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        running[k] = pid, now

    for k in parts:
        start(k)
    while running:
        time.sleep(0.05)
        for k, (pid, now) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            number, since = struct.unpack("<qd", now[:16])
            allowed = LIMIT_SECONDS * (TARGETS[of_number[number]].limits if since else 1)
            late = since and time.monotonic() - since > allowed
            if not ended and not late:
                continue
            if not ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del running[k]
            folder = scratch / f"worker-{k}"
            if (late or status) and len(_results(folder)) < len(parts[k]):
                name, number = parts[k][len(_results(folder))]
                what = "hang" if late else f"died of {os.waitstatus_to_exitcode(status)}"
                with open(folder / "results.jsonl", "a") as file:
                    said = (folder / "output").read_text(errors="replace")[-1000:]
                    file.write(json.dumps([name, number, what, said]) + "\n")
                if (folder / "input").is_dir():
                    (folder / "input").rename(scratch / "kept" / f"{name}-{number}")
            start(k)
    return [result for k in parts for result in _results(scratch / f"worker-{k}")]


def _results(folder: pathlib.Path) -> list:
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(argv: list[str] | None = None) -> int:
    """Runs the command; exit code 1 if there is a finding."""
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("--inputs", type=int, default=20_000)
    command.add_argument("--first", type=int, default=0, help="number of the first input")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--workers", type=int, default=os.cpu_count())
    command.add_argument("--only", choices=TARGETS, action="append", help="these targets alone")
    command.add_argument("--keep", metavar="DIR", help="where the inputs of findings are kept")
    args = command.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # The environment may keep bytecode of config files elsewhere: that would be found as a write
    # outside the worker's folder.
    sys.dont_write_bytecode = True
    # Imported once, before the fork; no backend of jax is started.

    from llmx import config
    from llmx.checkpoint import hf
    from llmx.config import checks, flags
    from llmx.data import __main__, dataset

    assert all((config, hf, checks, flags, __main__, dataset))
    names = args.only or [name for name, kind in TARGETS.items() if kind.limits == 1]
    inputs = [(names[n % len(names)], n) for n in range(args.first, args.first + args.inputs)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        scratch = pathlib.Path(args.keep or made)
        results = run_workers(inputs, args.seed, args.workers, scratch)
    counts: dict[str, collections.Counter] = {name: collections.Counter() for name in names}
    findings = []
    for name, number, outcome, details in results:
        counts[name][outcome] += 1
        if outcome not in ("loads", "refused"):
            findings.append((name, number, outcome, details))
    for name, number, outcome, details in findings[:50]:
        print(f"--- {name} {number} (seed {args.seed}): {outcome}\n{details}")
    for name, count in counts.items():
        print(f"{name}: " + ", ".join(f"{what} {n}" for what, n in sorted(count.items())))
    seconds = time.monotonic() - start
    print(f"{len(results)} inputs in {seconds:.0f} s: {len(findings)} findings")
    return 1 if findings or len(results) != len(inputs) else 0


if __name__ == "__main__":
    sys.exit(main())
