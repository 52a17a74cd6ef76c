"""Config files and the command line: `--config FILE --config.section.key=value`."""

import argparse
import functools
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from llmx import config as config_lib
from llmx.config import Config, ConfigError, family_checks, value_types
from llmx.data import json_files
from llmx.runtime import launch, printable


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """The command line that all commands share."""
    made = printable.Parser(
        prog=f"python -m {module}", description=description, allow_abbrev=False,
        epilog="Any value of the config is overridden by --config.SECTION.KEY=VALUE; "
        "docs/configuration.md lists them.",
    )  # fmt: skip
    made.add_argument("--config", required=True, help="a config file, e.g. configs/quickstart.py")
    made.add_argument("--workdir", default="", help="overrides config.workdir")
    return made


def parse(
    made: argparse.ArgumentParser, argv: Sequence[str] | None = None, *, auto_mesh: bool = False
) -> tuple[argparse.Namespace, Config, list[str]]:
    """The other arguments, the config with its overrides, and the problems of the overrides.

    `auto_mesh`: whether the command chooses a mesh itself for `--config.mesh=auto`, which is then
    `auto_mesh` of the arguments.

    Raises ConfigError where there is no config: the file is missing or fails.
    """
    args, rest = made.parse_known_args(sys.argv[1:] if argv is None else argv)
    overrides, others = _overrides(rest)
    if others:
        made.error(f"unknown arguments: {' '.join(others)} (overrides are --config.KEY=VALUE)")
    args.auto_mesh = overrides.get("mesh") == "auto"
    if args.auto_mesh:
        del overrides["mesh"]
    config, problems = _load(args.config, overrides)
    if args.auto_mesh and not auto_mesh:
        problems.append(
            "mesh='auto' is for llmx.train and llmx.plan --machine, which choose: give others the "
            "flags that llmx.plan --search prints"
        )
    elif args.auto_mesh and (own := [key for key in overrides if key.startswith("mesh.")]):
        problems.append(f"mesh='auto' beside {', '.join(own)}: leave one of them out")
    if args.workdir:
        config.workdir = args.workdir
    if not config.workdir:
        config.workdir = str(pathlib.Path("runs") / pathlib.Path(args.config.split(":")[0]).stem)
    return args, config, problems


def _overrides(rest: list[str]) -> tuple[dict[str, str], list[str]]:
    """{key: text} of --config.KEY=TEXT, --config.KEY TEXT, --noconfig.KEY; and what is left."""
    found, others, rest = {}, [], list(rest)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        if name.startswith("--config."):
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            found[name.removeprefix("--config.")] = value
        elif name.startswith("--noconfig.") and not equals:
            found[name.removeprefix("--noconfig.")] = "false"
        else:
            others.append(argument)
    return found, others


def _load(path: str, overrides: dict[str, str]) -> tuple[Config, list[str]]:
    """The file's config with each override applied; what is wrong with an override is a problem."""
    import absl.flags
    from ml_collections import config_flags

    def read(arguments: Sequence[str]) -> Config:
        values = absl.flags.FlagValues()
        argv = ["llmx", *arguments]
        if kind == ".json":
            saved = config_lib.read_saved(file)
            define = functools.partial(config_flags.DEFINE_config_dataclass, "config", saved)
        else:
            define = functools.partial(config_flags.DEFINE_config_file, "config")
            argv.insert(1, f"--config={path}")
        holder = define(flag_values=values, sys_argv=argv)
        values(argv)
        return holder.value

    file, kind = path.split(":")[0], pathlib.Path(path.split(":")[0]).suffix
    if not os.path.isfile(file):
        what = "this is a folder: name a file" if os.path.isdir(path) else "there is no such file"
        raise ConfigError([f"--config={path}: {what}"])
    if kind not in (".py", ".json"):
        raise ConfigError([
            f"--config={path}: a config is a Python file with a function get_config(), such as "
            "configs/quickstart.py, or the config.json of a run"
        ])  # fmt: skip
    try:
        config = read([])
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        last = lines[-1]
        if "has no attribute 'get_config'" in last:
            last = "it has no function get_config(), which makes the config"
        elif kind == ".json":
            last = " ".join(lines)
        raise ConfigError([f"{_line_of(error, path, file)} fails: {last}"]) from error
    if not isinstance(config, Config):
        given = type(config).__name__
        raise ConfigError([f"{path}: get_config() returns {given}; return an llmx.config.Config"])
    if kind == ".json" and (left := _left_out(config, config_lib.read_written(file), overrides)):
        launch.note(
            f"{path} is of another start, whose settings of the machine are not taken: "
            f"{', '.join(left)}; give as --config.KEY=VALUE what is to hold here"
        )
    return config, _override(config, overrides, read, path)


def _override(
    config: Config, overrides: Mapping[str, str], read: Callable[[Sequence[str]], Config], path: str
) -> list[str]:
    """Sets each override, which `read` turns into a value of its type; returns the problems."""
    import absl.flags

    kinds, problems, made = config_lib.leaf_types(Config), [], config.model.family
    for key, text in overrides.items():
        if key not in kinds:
            problems.append(config_lib.unknown_key(key, kinds))
            continue
        try:
            # One at a time: a bad value does not hide the next.
            value = config_lib.get_value(read([f"--config.{key}={text}"]), key)
            config_lib.set_value(config, key, value)
        except (ValueError, TypeError, absl.flags.Error):
            wanted = value_types.type_name(kinds[key])
            problems.append(f"{key}={json_files.shown(text)} is not {wanted}")
    if config.model.family != made and (why_not := family_checks.why_not(config.model)):
        problems.append(
            f"model.family={config.model.family!r} changes the name alone of a model that {path} "
            f"makes as {made!r} ({why_not}): use families.preset({config.model.family!r}, ...) in "
            "a config file, which also sets what that has"
        )
        config.model.family = made
    return problems


def _line_of(error: BaseException, path: str, file: str) -> str:
    """The path of a config file, with the line that failed, where one did."""
    if isinstance(error, SyntaxError) and error.filename and os.path.samefile(error.filename, file):
        return f"{path}, line {error.lineno},"
    frames, chain = [], error
    while chain is not None:  # ml_collections raises another
        frames, chain = [*traceback.extract_tb(chain.__traceback__), *frames], chain.__context__
    lines = [one.lineno for one in frames if os.path.abspath(one.filename) == os.path.abspath(file)]
    return f"{path}, line {lines[-1]}," if lines else path


def _left_out(config: Config, written: Config, overrides: Mapping[str, str]) -> list[str]:
    """KEY=VALUE of the settings of a machine in a run's config.json that are other ones here."""
    return [
        f"{key}={json_files.shown(value)}"
        for key in config_lib.machine_keys()
        if key != "workdir" and key not in overrides
        and (value := config_lib.get_value(written, key)) != config_lib.get_value(config, key)
    ]  # fmt: skip
