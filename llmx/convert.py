"""Converts runs to and from Hugging Face checkpoints.

    python -m llmx.convert --workdir W (--to-hf DIR | --to-gguf FILE | --from-hf DIR)

`--to-hf` writes the parameters and the tokenizer of the run W as a directory that transformers
loads; packed weights as `compressed-tensors` stores them. `--to-gguf` writes a file for llama.cpp.
`--from-hf` creates W from such a directory: a config, the tokenizer, and a checkpoint of the
parameters, which `llmx.generate` and `llmx.evaluate` accept as any other. No accelerator is used.
"""

import argparse
import contextlib
import copy
import functools
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from llmx import config, sharding
from llmx.checkpoint import (
    checkpointer,
    copies,
    gguf_file,
    hf,
    hf_files,
    hf_formats,
    hf_reader,
    identity,
    mirror,
    model_params,
    peft,
    streamed,
    writer,
)
from llmx.config import checks, recipe
from llmx.data import chat, remote, tokenizers, transient
from llmx.model import dense
from llmx.runtime import exits, launch, output_paths, ownership, printable


def to_hf(
    workdir: str, directory: str, *, at_step: int | None = None, ema: bool | None = None,
    dtype: str | None = None,
) -> int:  # fmt: skip
    """Writes the parameters of a run into `directory`, new or empty; returns their step.

    Args:
      at_step: of the checkpoint; None = the newest.
      ema: whether to write the average of the parameters; None = if the run has one.
      dtype: a name in `hf_reader.DTYPES`; None = that of the checkpoint the run comes from, or
        float32.

    Raises ValueError if there is no such checkpoint, or the format cannot represent the model.
    """
    if remote.is_url(directory):
        return _to_store(
            "--to-hf=", directory,
            functools.partial(to_hf, workdir, at_step=at_step, ema=ema, dtype=dtype),
            last=hf.CONFIG,
        )  # fmt: skip
    workdir = mirror.reading(workdir)
    run = config.load_run(workdir)
    ema = _average(run, ema)
    model = dense.dense_model(run.model)
    hf_formats.model_config_to_hf(model)  # raises before anything large is read
    coder = tokenizers.load(f"{workdir}/tokenizer.json")
    params, step = _dense_params(run, _abstract_params(run), ema=ema, at_step=at_step)
    steps = checkpointer.list_steps(f"{workdir}/checkpoints")
    # The files beside a tokenizer may be of a model that this run has only borrowed it from.
    known = hf_files.dtype(coder.files, hf_reader.DTYPES)
    came_from = run.start_from or checkpointer.is_import(f"{workdir}/checkpoints", min(steps))
    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch, tokenizers.FILE_NAME)
        file.write_bytes(_tokenizer_file(coder))
        hf.export(
            params, model, directory, tokenizer_file=file,
            end_token=coder.end_of_document, ids=hf_files.ids_of(coder),
            files=coder.files if came_from else hf_files.borrowed(coder.files),
            ends_of_turn=chat.ends_of_turn(coder, run.data.format),
            dtype=dtype or (known if came_from else "float32"),
        )  # fmt: skip
    return step


def _dense_params(
    run: config.Config, shapes: Any, *, ema: bool, at_step: int | None
) -> tuple[Any, int]:
    """The parameters of the plain model of a run, to be read from its files where it is one
    already; and the checkpoint's step."""
    plain = dense.is_dense(run.model)
    restored = model_params.restore_params(
        run.workdir, shapes, ema=ema, step=at_step, log=launch.log,
        reader=streamed.FROM_FILES if plain else None,
    )  # fmt: skip
    params = restored.state
    if not plain:
        params = dense.dense_params(jax.device_get(params), run.model)
    return params, restored.step


def to_gguf(
    workdir: str, file: str, *, at_step: int | None = None, ema: bool | None = None,
    dtype: str = "float32",
) -> int:  # fmt: skip
    """Writes the parameters of a run as one GGUF file, new, and returns the checkpoint's step.

    Prints what the file does not say of the tokenizer.

    Args: as of `to_hf`.

    Raises ValueError if there is no such checkpoint, or the format cannot represent the model.
    """
    remote.require_local("--to-gguf=", file)
    workdir = mirror.reading(workdir)
    run = config.load_run(workdir)
    ema, shapes = _average(run, ema), _abstract_params(run)
    model = dense.dense_model(run.model)
    if found := gguf_file.problems(model, shapes):  # before anything large is read
        raise ValueError("\n".join(found))
    coder = tokenizers.load(f"{workdir}/tokenizer.json")
    params, step = _dense_params(run, shapes, ema=ema, at_step=at_step)
    own = coder.special.get(coder.names["eos_token"], coder.end_of_document)
    ends = [own, *chat.ends_of_turn(coder, run.data.format), *coder.stop_tokens]
    lines = gguf_file.export(
        params, model, file, tokenizer=_tokenizer_content(coder),
        end_token=list(dict.fromkeys(ends)),
        names=coder.names, template=coder.template, dtype=dtype,
    )  # fmt: skip
    for line in lines:
        launch.log(f"warning: {file}: {line}")
    return step


def to_peft(
    workdir: str, directory: str, *, at_step: int | None = None, ema: bool | None = None
) -> int:
    """Writes a run's adapters as PEFT has them, and returns the checkpoint's step.

    Args: as of `to_hf`.

    Raises ValueError if the run has no adapters, or no such checkpoint, or the family's format
    cannot represent the model to which PEFT adds them.
    """
    if remote.is_url(directory):
        return _to_store(
            "--to-peft=", directory, functools.partial(to_peft, workdir, at_step=at_step, ema=ema),
            last=peft.CONFIG,
        )  # fmt: skip
    workdir = mirror.reading(workdir)
    run = config.load_run(workdir)
    if not run.adapters.rank:
        raise ValueError(
            f"--to-peft: the run in {workdir} has no adapters (adapters.rank=0): export its model "
            "with --to-hf"
        )
    hf_formats.model_config_to_hf(run.model)  # raises before anything large is read
    restored = model_params.restore_adapters(
        workdir, _abstract_params(run), run.adapters, ema=_average(run, ema), step=at_step,
        log=launch.log,
    )  # fmt: skip
    base, _ = identity.origin(run.start_from)
    local = str(pathlib.Path(base).resolve()) if hf_reader.is_checkpoint(base) else ""
    base = local or copies.name_on_hub(base)
    peft.export(restored.state, run.adapters, run.model, directory, base=base)
    return restored.step


def _average(run: config.Config, ema: bool | None) -> bool:
    """Whether the average is exported; None = if the run has one. ValueError if it has none."""
    averaged = run.optimizer.ema_decay > 0
    if ema and not averaged:
        problem = f"the run in {run.workdir} has optimizer.ema_decay=0 and keeps no average"
        raise ValueError(f"--ema: {problem}: leave the flag out")
    return averaged and ema is not False


def _to_store(flag: str, url: str, export: Callable[[str], int], *, last: str) -> int:
    """Exports into a local folder and uploads it, the file `last` last; returns the step."""
    if found := remote.problems(flag, url):
        raise ValueError(found[0])
    with remote.writing(f"{flag}{url}"):
        _left_in_store(url, last)
    place = url.rstrip("/")
    mark = f"{place}/{output_paths.UNFINISHED}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch, "exported")
        step = export(str(folder))
        with remote.writing(f"{flag}{url}"):
            left = _left_in_store(url, last)  # once more: the export took long
            owner = ownership.own_record(ownership.TTL_SECONDS)
            remote.write_bytes(mark, json.dumps(owner).encode())
            for name in left - {output_paths.UNFINISHED}:
                remote.remove(f"{place}/{name}")
            remote.upload_folder(folder, url, last=last)
            remote.remove(mark)
    return step


def _left_in_store(url: str, last: str) -> set[str]:
    """What an export that was killed left there. Raises ValueError where there is anything else, or
    where it still runs, on this machine."""
    kind = remote.kind_of(url)
    left = {*remote.find(url)} if kind == "folder" else set()
    mark = f"{url.rstrip('/')}/{output_paths.UNFINISHED}"
    owner: Any = None
    if output_paths.UNFINISHED in left:
        with contextlib.suppress(ValueError):
            owner = json.loads(remote.read_bytes(mark, most=1 << 16))
    if (
        isinstance(owner, dict) and owner.get("pid") != os.getpid()
        and ownership.is_here(owner) and ownership.is_alive(owner)
    ):  # fmt: skip
        raise ValueError(f"{url} is being written by process {owner['pid']}: wait for it to end")
    if kind == "file" or not output_paths.may_be_filled(left, last):
        if {last, output_paths.UNFINISHED} <= left:  # complete: killed just then
            remote.remove(mark)
        raise ValueError(f"{url} exists and is not empty: export into a new directory")
    return left


def from_hf(directory: str, workdir: str, *, tokenizer: str = ""):
    """Creates the work directory of a run at step 0 from a Hugging Face checkpoint, in its dtype.

    Tensors are read and written in pieces: the model need not fit into memory.

    Args:
      tokenizer: "bytes", or a tokenizer.json; "" = that of `directory`.

    Raises ValueError if `workdir` is not empty or `directory` has no checkpoint of a known family.
    """
    origin = directory
    if remote.is_url(str(directory)):
        directory, _ = copies.local("--from-hf=", directory, launch.log)
    remote.require_local("--workdir=", workdir)
    root = pathlib.Path(workdir)
    output_paths.require_new(root, **_IMPORT)
    run = config.default()
    run.workdir = workdir
    source = hf_reader.open_checkpoint(directory)
    run.model = source.model
    run.batch.sequence_length = min(run.batch.sequence_length, run.model.max_positions)
    run.optimizer.ema_decay = 0.0
    file = pathlib.Path(directory, tokenizers.FILE_NAME)
    coder = tokenizers.load(tokenizer or file) if tokenizer or file.is_file() else None
    files = hf_files.read(directory) | (coder.files if tokenizer and coder else {})
    hf_files.special_ids(files, end_token=None)  # raises where they are none
    # Also without the file: no other tokenizer may take its place unasked.
    run.data.tokenizer = str(root / tokenizers.FILE_NAME)
    arrays = {f"params/{path}": _streamed(source, path) for path in source.shapes}
    with ownership.take(workdir, log=launch.log), writer.filling(root, **_IMPORT):
        meta = {"imported_from": str(origin), "config": config.to_json(run)}
        streamed.save(f"{workdir}/checkpoints", 0, arrays, meta)
        if coder is not None:
            coder.files = files
            coder.save(root / tokenizers.FILE_NAME)
        config.save_run(run)
    if coder is None:
        launch.log(f"warning: {_no_tokenizer(origin)}; until then {_REFUSE}")


def _streamed(source: hf_reader.Source, path: str) -> streamed.Streamed:
    """A parameter, layer by layer where it has several."""
    dtype, by_layer = source.dtype(path), path.startswith(("blocks/", "first/"))
    part = functools.partial(source.part, path, dtype=dtype)
    return streamed.Streamed(source.shapes[path], dtype, by_layer, part)


# What a work directory may have that an import makes, see `output_paths.require_new`.
_IMPORT = {
    "last": "config.json", "besides": ownership.FILES, "remedy": "import into a new directory",
}  # fmt: skip
_REFUSE = "llmx.generate and llmx.evaluate refuse the run"


def _no_tokenizer(directory: str) -> str:
    return (
        f"{directory} has no {tokenizers.FILE_NAME}: write one there (in Python: "
        f"transformers.AutoTokenizer.from_pretrained({directory!r}).save_pretrained({directory!r}))"
        " and import again, or import with --tokenizer FILE"
    )


def _abstract_params(run: config.Config) -> Any:
    """Shapes with shardings of the run's parameters, whole on one device."""
    whole = copy.deepcopy(run)
    checks.forget_training(whole)
    whole.mesh, whole.sharding = sharding.MeshConfig(data=1), sharding.ShardingConfig(layout="ddp")
    return recipe.make_recipe(whole, devices=jax.devices()[:1]).loss.params


def _tokenizer_file(coder: tokenizers.Tokenizer) -> bytes:
    """A tokenizer.json: that of the file, or one equivalent to the byte tokenizer."""
    if isinstance(coder, tokenizers.FileTokenizer):
        return coder.dumps()
    import tokenizers as library

    # The library maps bytes as GPT-2: printable ones to themselves, others in order from U+0100.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocab, merges=[]))
    pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, library.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.END_TOKENS[0]])
    assert tokenizer.token_to_id(tokenizers.END_TOKENS[0]) == coder.end_of_document
    return tokenizer.to_str().encode()


def _tokenizer_content(coder: tokenizers.Tokenizer) -> dict[str, Any]:
    """What a tokenizer.json says of it, with the tokens that it made special."""
    if isinstance(coder, tokenizers.FileTokenizer):
        return coder.content()
    return json.loads(_tokenizer_file(coder))


def _command() -> argparse.ArgumentParser:
    command = printable.Parser(
        prog="python -m llmx.convert", allow_abbrev=False,
        description="Writes a run as a Hugging Face checkpoint or a GGUF file, or makes a work "
        "directory of a Hugging Face checkpoint.",
    )  # fmt: skip
    command.add_argument("--workdir", required=True, help="of the run, or to be created")
    way = command.add_mutually_exclusive_group(required=True)
    way.add_argument("--to-hf", metavar="DIR", help="a new directory for transformers, or a URL")
    way.add_argument("--to-gguf", metavar="FILE", help="a new GGUF file, for llama.cpp")
    adapters = "a new directory for peft, or a URL: the adapters only"
    way.add_argument("--to-peft", metavar="DIR", help=adapters)
    way.add_argument(
        "--from-hf", metavar="DIR", help="a directory of config.json and safetensors, or a URL"
    )
    command.add_argument("--step", type=int, help="checkpoint to write; the newest by default")
    average = "write the average of the parameters; by default if the run keeps one"
    command.add_argument("--ema", action=argparse.BooleanOptionalAction, help=average)
    dtypes = (
        "to write; by default that of the imported checkpoint, or float32, in a GGUF file float32"
    )
    command.add_argument("--dtype", choices=sorted(hf_reader.DTYPES), help=dtypes)
    named = '"bytes" or a tokenizer.json; by default that of the imported directory'
    command.add_argument("--tokenizer", metavar="NAME", default="", help=named)
    return command


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Exit code: 0 done, 2 if the input is wrong, 74 if the disk is full, 75 if a store or a disk did
    not answer and the same command may succeed, 130 after Ctrl-C.
    """
    command = _command()
    args = command.parse_args(argv)
    if args.from_hf and (args.step, args.ema, args.dtype) != (None, None, None):
        command.error("--step, --ema and --dtype go with --to-hf")
    if args.to_peft and args.dtype:
        command.error("--dtype goes with --to-hf and --to-gguf: adapters are written in float32")
    if args.tokenizer and not args.from_hf:
        command.error("--tokenizer goes with --from-hf")
    # Nothing is computed, and the host has more memory than a device.
    jax.config.update("jax_platforms", "cpu")
    try:
        if args.from_hf:
            from_hf(args.from_hf, args.workdir, tokenizer=args.tokenizer)
            launch.log(f"{args.from_hf} is now the run in {args.workdir}, at step 0")
        elif args.to_gguf:
            dtype = args.dtype or "float32"
            step = to_gguf(args.workdir, args.to_gguf, at_step=args.step, ema=args.ema, dtype=dtype)
            launch.log(f"step {step} of {args.workdir} is now in {args.to_gguf}")
        elif args.to_peft:
            step = to_peft(args.workdir, args.to_peft, at_step=args.step, ema=args.ema)
            launch.log(f"the adapters of step {step} of {args.workdir} are now in {args.to_peft}")
        else:
            step = to_hf(
                args.workdir, args.to_hf, at_step=args.step, ema=args.ema, dtype=args.dtype
            )
            launch.log(f"step {step} of {args.workdir} is now in {args.to_hf}")
        return 0
    except writer.Unwritten as error:
        printable.error(error)
        return exits.UNSAVED
    # RuntimeError: no checkpoint of the run is good.
    except (ValueError, RuntimeError, OSError) as error:
        printable.error(transient.told(error))
        return transient.exit_code(error)
    except KeyboardInterrupt:  # what was written is removed
        print("interrupted: run the same command again", file=sys.stderr)
        return exits.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
