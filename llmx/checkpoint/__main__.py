"""Looks after checkpoints: python -m llmx.checkpoint ls|verify|diff|export|rm WORKDIR ...

No accelerator is needed, and no memory beyond one array (diff: two; export: all that it writes).
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from llmx.checkpoint import mirror
from llmx.data import remote, transient
from llmx.runtime import exits, printable

if __name__ == "__main__":
    exits.silent_interrupts()


def _parser() -> argparse.ArgumentParser:
    parser = printable.Parser("python -m llmx.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *, step: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("workdir", help="the run's work directory")
        if step:
            sub.add_argument("--step", type=int, help="this step; by default the newest")
        return sub

    ls = command("ls", "lists the checkpoints; reads no arrays", step=False)
    ls.add_argument("--json", action="store_true", help="print JSON")
    verify = command("verify", "computes all checksums again; exit code 1 if one is wrong")
    verify.add_argument("--all", action="store_true", help="every checkpoint")
    diff = command("diff", "compares two checkpoints, of one run or of two")
    diff.add_argument("other", nargs="?", help="work directory of the other; by default the same")
    diff.add_argument("--other-step", type=int, help="by default the newest")
    export = command("export", "writes arrays to one .safetensors or .npz file")
    export.add_argument("file")
    export.add_argument("--prefix", default="params", help='"params", "ema", "opt_state", ...')
    rm = command("rm", "deletes checkpoints", step=False)
    rm.add_argument("steps", type=int, nargs="+")
    rm.add_argument("--force", action="store_true", help="also the last good one")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a checkpoint is bad or two differ, 2 the request is wrong, 75
    a disk or a store failed."""
    args = _parser().parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        return COMMANDS[args.command](args)
    except (ValueError, OSError, MemoryError) as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)


def _root(workdir: str) -> Any:
    from llmx.checkpoint import directory

    workdir = mirror.reading(workdir)
    root = directory.root_of(f"{workdir}/checkpoints")
    if not directory.root_of(workdir).is_dir():
        raise ValueError(f"{workdir} is not a directory: name the work directory of a run")
    if not root.exists():
        begun = (directory.root_of(workdir) / "config.json").exists()
        why = "the run has saved none yet" if begun else "name the work directory of a run"
        raise ValueError(f"{workdir} holds no checkpoints: {why}")
    return root


def _step(root: Any, step: int | None) -> int:
    from llmx.checkpoint import directory, restore

    steps = directory.steps(root)
    if not steps:
        raise ValueError(f"no checkpoint in {root}")
    if step is not None:
        restore.require(root, step)
    return steps[-1] if step is None else step


def _document(root: Any, step: int) -> Any:
    from llmx.checkpoint import manifest, restore

    try:
        return restore.read_document(root, step)
    except (manifest.Corrupt, manifest.Mismatch, manifest.Unreadable) as error:
        raise ValueError(f"checkpoint {step} in {root}: {error}") from error


def _arrays(
    root: Any, document: Any, names: Sequence[str], *, stored: bool = False
) -> Iterator[tuple[str, Any]]:
    """(name, array on one device), one after the other, PRNG keys as integers.

    Layers are in the model's order, or with `stored` as they are on disk. Raises Corrupt for what
    cannot be read.
    """
    import jax

    from llmx.checkpoint import directory, restore
    from llmx.pipeline.permutation import IDENTITY

    path = root / str(document.step) / directory.STATE
    for name in names:
        leaf = document.leaves[name]
        # A PRNG key is on disk as its integers.
        if leaf["dtype"].startswith("key<"):
            implementation = leaf["dtype"][4:-1]
            dtype = jax.eval_shape(lambda i=implementation: jax.random.key(0, impl=_key_name(i)))
            like = jax.ShapeDtypeStruct(leaf["shape"], dtype.dtype)
        else:
            like = jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"])
        array = restore.read_arrays(path, {name: like}, document.saved_names)[name]
        if not stored and document.order.moves(name, array.shape, IDENTITY):
            array = document.order.inverse(array)
        yield name, array


def _key_name(tag: str) -> str:
    return {"fry": "threefry2x32", "urbg": "unsafe_rbg"}.get(tag, tag)


def _array_names(document: Any, prefix: str = "") -> list[str]:
    names = [name for name, leaf in document.leaves.items() if leaf["type"] == "array"]
    return [n for n in names if not prefix or n == prefix or n.startswith(f"{prefix}/")]


# ------------------------------------------------------------------------------------- the commands


def ls(args: argparse.Namespace) -> int:
    from llmx.checkpoint import directory, restore
    from llmx.checkpoint.manifest import Corrupt, Mismatch, Unreadable

    root = _root(args.workdir)
    rows = []
    if not (entries := directory.entries(root)):
        raise ValueError(f"no checkpoint in {root}")
    for entry in entries:
        if entry.kind == "foreign":
            continue
        path = root / entry.name
        row: dict[str, Any] = {"name": entry.name, "step": entry.step, "state": entry.kind}
        row["bytes"] = directory.num_bytes(path)
        row["date"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().mtime))
        if entry.kind != "unfinished":
            try:
                document = restore.manifest.read(path / directory.META / "metadata")
                config = document.meta.get("config") or {}
                row["mesh"] = document.meta.get("mesh")
                row["strategy"] = (config.get("sync") or {}).get("strategy")
                size = document.meta.get("batch_size")
                row["samples"] = size * document.step if isinstance(size, int) else None
                if not (path / directory.STATE / "_METADATA").exists():
                    raise Corrupt("its arrays are missing")
            except (Corrupt, Mismatch, Unreadable, AttributeError) as error:
                row["state"], row["problem"] = "corrupt", str(error)
        rows.append(row)
    if args.json:
        exits.show(json.dumps(rows, indent=1))
        return exits.DONE
    exits.show(
        f"{'name':<16}{'state':<12}{'date':<21}{'size':>12}  {'samples':>10}  strategy  mesh"
    )
    for row in rows:
        mesh = row.get("mesh")
        sizes = mesh.items() if isinstance(mesh, dict) else ()
        mesh = " ".join(f"{axis}={size}" for axis, size in sizes if size != 1)
        size = f"{row['bytes'] / 2**20:,.1f} MiB"
        exits.show(
            f"{row['name']:<16}{row['state']:<12}{row['date']:<21}{size:>12}  "
            f"{row.get('samples') or '-':>10}  {row.get('strategy') or '-':<8}  {mesh or '-'}"
            + (f"  ({row['problem']})" if "problem" in row else "")
        )
    return exits.DONE


def verify(args: argparse.Namespace) -> int:
    from llmx.checkpoint import checksums, directory, manifest, restore
    from llmx.tables import host_files

    root, bad = _root(args.workdir), 0
    newest = _step(root, args.step)
    for step in directory.steps(root) if args.all else [newest]:
        wrong = []
        try:
            document = restore.read_document(root, step)
            for name, array in _arrays(root, document, _array_names(document), stored=True):
                if checksums.fingerprints({name: array})[name] != document.leaves[name]["checksum"]:
                    wrong.append(name)
            reason = f"checksum differs in leaf {', '.join(wrong)}" if wrong else ""
            if document.meta.get("config", {}).get("tables", {}).get("cache_rows"):
                host_files.check(root / str(step) / host_files.FOLDER)
        except (manifest.Corrupt, manifest.Mismatch, manifest.Unreadable) as error:
            reason = str(error)
        except ValueError as error:  # of the host's rows
            reason = str(error)
        bad += bool(reason)
        exits.show(f"checkpoint {step}: {f'corrupt: {reason}' if reason else 'good'}")
    return 1 if bad else exits.DONE


def diff(args: argparse.Namespace) -> int:
    import numpy as np

    from llmx.checkpoint import identity

    roots = [_root(args.workdir), _root(args.other or args.workdir)]
    steps = [_step(roots[0], args.step), _step(roots[1], args.other_step)]
    first, second = (_document(root, step) for root, step in zip(roots, steps, strict=True))
    exits.show(f"{roots[0]}/{steps[0]} and {roots[1]}/{steps[1]}:")
    configs = (document.meta.get("config") or {} for document in (first, second))
    changed = identity.differences(*configs)
    different = bool(changed)
    for text in identity.difference_lines(changed):
        exits.show(f"  config {text}")
    names = [_array_names(document) for document in (first, second)]
    for name in sorted(set(names[0]) ^ set(names[1])):
        different = True
        exits.show(f"  {name}: only in {'the first' if name in names[0] else 'the second'}")
    both = [name for name in names[0] if name in set(names[1])]
    pairs = zip(_arrays(roots[0], first, both), _arrays(roots[1], second, both), strict=True)
    for (name, a), (_, b) in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            different = True
            exits.show(f"  {name}: {a.dtype}{list(a.shape)}, {b.dtype}{list(b.shape)}")
            continue
        x, y = (np.asarray(array) for array in (a, b))
        num = int((x != y).sum())
        if not num:
            continue
        different = True
        x, y = (array.astype(np.float64) for array in (x, y))
        largest, scale = float(np.abs(x - y).max()), float(np.sqrt((x * x).sum())) or 1.0
        relative = float(np.sqrt(((x - y) ** 2).sum())) / scale
        text = f"{num:,} of {x.size:,} elements, at most {largest:.3g}, relative {relative:.3g}"
        exits.show(f"  {name}: {text}")
    if not different:
        exits.show("  the same")
    return 1 if different else exits.DONE


def export(args: argparse.Namespace) -> int:
    import numpy as np

    kind = os.path.splitext(args.file)[1]
    if kind not in (".safetensors", ".npz"):
        raise ValueError(f"{args.file} is neither .safetensors nor .npz: name one of them")
    root = _root(args.workdir)
    step = _step(root, args.step)
    document = _document(root, step)
    names = _array_names(document, args.prefix)
    if not names:
        tops = sorted({name.split("/")[0] for name in _array_names(document)})
        raise ValueError(f"checkpoint {step} has nothing under {args.prefix!r}: use one of {tops}")
    arrays = {}
    from llmx.checkpoint.manifest import Corrupt, Unreadable

    try:
        for name, array in _arrays(root, document, names):
            # numpy's own format has no bfloat16 and fp8; float32 holds them exactly.
            odd = kind == ".npz" and np.dtype(array.dtype).kind == "V"
            arrays[name] = np.asarray(array.astype(np.float32) if odd else array)
    except (Corrupt, Unreadable) as error:
        raise ValueError(f"checkpoint {step} in {root}: {error}") from error
    _write_arrays(args.file, arrays, {"step": str(step)})
    exits.show(f"{len(arrays)} arrays of checkpoint {step} are in {args.file}")
    return exits.DONE


def _write_arrays(path: str, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    """Writes the file; it has its name once it is complete, and nothing is left of it otherwise."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    from llmx.checkpoint import writer

    partial = f"{path}.partial"
    try:
        if path.endswith(".npz"):
            with open(partial, "wb") as file:
                np.savez(file, **arrays)
        else:
            save_file(arrays, partial, metadata=metadata)
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        cause, remedy = writer.reason(error)
        raise ValueError(f"{path} cannot be written: {cause}: {remedy}") from error


def rm(args: argparse.Namespace) -> int:
    from llmx.checkpoint import checkpointer, directory, restore
    from llmx.runtime import ownership

    remote.require_local("", args.workdir, "a store is changed by its own tools")
    root = _root(args.workdir)
    for step in args.steps:
        restore.require(root, step)
    good = [s for s in directory.steps(root) if checkpointer.is_intact(root, s)]
    if not args.force and good and set(good) <= set(args.steps):
        raise ValueError(f"{good[-1]} is the last good checkpoint in {root}: --force deletes it")
    with ownership.take(args.workdir, log=exits.show):
        for step in args.steps:
            directory.start_removing(root, str(step)).join()
            exits.show(f"deleted checkpoint {step}")
    return exits.DONE


COMMANDS = {"ls": ls, "verify": verify, "diff": diff, "export": export, "rm": rm}

if __name__ == "__main__":
    sys.exit(main())
