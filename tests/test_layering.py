"""Imports point down: every module has a row; imports, local ones too, go to lower rows only."""

import ast
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "llmx"

# Rooms and commands by row. Inside a room imports may go sideways, not in circles.
ROWS = [
    {"sharding", "runtime", "data", "contract"},
    {"tables"},
    {"model"},
    {"pipeline", "sync"},
    {"step"},
    {"checkpoint"},
    {"config"},
    {"aot"},
    {"plan", "report", "evaluate", "generate", "convert", "metrics"},
    {"train"},
    {"library", "__main__"},
    {"compress"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
COMMAND_ROW = 8  # of a room's __main__

# The only importers of packages that the rest of the project must not depend on.
SOLE_IMPORTERS = {
    "flax": {"llmx.model.decoder", "llmx.model.apply", "llmx.model.own"},
    "ml_collections": {"llmx.config.flags"},
}

# A drawer's name says nothing of what is in it.
DRAWERS = {"utils", "util", "helpers", "helper", "common", "core", "base", "manager", "misc"}


def module_name(path: pathlib.Path) -> str:
    parts = ("llmx", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name: str, source: str) -> set[str]:
    """Full names of all that a module imports, at any depth of its text.

    `from a import b` counts as `a.b` if that is a module of llmx, else as `a`.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} line {node.lineno}: relative import; write llmx...."
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else node.module)
    return found


def problems_of(name: str, source: str) -> list[str]:
    """What is wrong with the imports of one module."""
    found = []
    own = name.split(".")[1] if "." in name else None
    is_command = name.endswith(".__main__") and own != "__main__"
    row = COMMAND_ROW if is_command else ROW_OF.get(own)
    for imported in sorted(imports_of(name, source)):
        top, *rest = imported.split(".")
        if top in SOLE_IMPORTERS and name not in SOLE_IMPORTERS[top]:
            found.append(f"{name} imports {top}: only {sorted(SOLE_IMPORTERS[top])} may")
        if top != "llmx" or (rest and rest[0] == own) or not rest:
            continue
        if rest[0] not in ROW_OF:
            found.append(f"{name} imports {imported}, which has no row: add it to ROWS")
        elif row is not None and ROW_OF[rest[0]] >= row:
            found.append(
                f"{name} (row {row}) imports {imported} (row {ROW_OF[rest[0]]}): imports "
                "go to lower rows only; move the code down, or give the module a higher row"
            )
    return found


def docstring_of(path: pathlib.Path) -> str | None:
    return ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("name", [name for name in MODULES if name != "llmx"])
def test_imports_go_down_and_the_module_says_what_it_is_for(name):
    top = name.split(".")[1]
    assert top in ROW_OF, f"llmx.{top} has no row: add it to ROWS in this file"
    assert not (problems := problems_of(name, MODULES[name].read_text())), "\n".join(problems)
    assert not DRAWERS & set(name.split(".")), f"{name}: name a module after what it does"
    assert docstring_of(MODULES[name]), f"{name} has no docstring"


def test_no_import_circles():
    graph = {
        name: {target for target in imports_of(name, path.read_text()) if target in MODULES}
        - {name, "llmx"}
        for name, path in MODULES.items()
    }
    while leaves := {name for name, targets in graph.items() if not targets & set(graph)}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    assert not graph, (
        f"these import each other in a circle, or import one that does: {sorted(graph)}"
    )


def test_the_package_exports_its_version_and_fit_only():
    tree = ast.parse(MODULES["llmx"].read_text())
    assigned = [
        target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    ]
    assert assigned == ["__version__"]
    assert ast.get_docstring(tree)
    *_, lazy = tree.body
    assert len(tree.body) == 3, "llmx/__init__.py holds a docstring, the version and __getattr__"
    assert isinstance(lazy, ast.FunctionDef) and lazy.name == "__getattr__"


def test_rows_name_each_module_once():
    assert sum(map(len, ROWS)) == len(ROW_OF)


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("llmx.model.dot", "from llmx.step import guard", "(row 2) imports llmx.step"),
        ("llmx.sync.local", "import llmx.pipeline.ticks", "(row 3) imports llmx.pipeline.ticks"),
        ("llmx.sharding.mesh", "def f():\n    from flax import nnx", "imports flax: only"),
        ("llmx.train", "import ml_collections", "imports ml_collections: only"),
        ("llmx.train", "import llmx.unknown", "has no row"),
        ("llmx.aot.__main__", "from llmx.plan import draw", "(row 8) imports llmx.plan.draw"),
    ],
)
def test_the_check_finds_what_it_is_for(name, source, words):
    (problem,) = problems_of(name, source)
    assert words in problem


LONGEST_FUNCTION, LONGEST_FILE, MOST_ENTRIES = 60, 600, 23
LONG_STORIES = {("llmx.train", "main")}  # one linear text


@pytest.mark.parametrize("name", MODULES)
def test_functions_and_files_stay_short(name):
    text = MODULES[name].read_text()
    assert len(text.splitlines()) <= LONGEST_FILE, f"{name}: split it"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and (name, node.name) not in LONG_STORIES:
            lines = node.end_lineno - node.lineno + 1
            assert lines <= LONGEST_FUNCTION, f"{name}.{node.name}: {lines} lines; split it"


def test_the_package_has_few_entries():
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES, f"put it into a room: {sorted(entries)}"


def test_the_step_names_no_technique():
    from llmx.pipeline.schedules import SCHEDULES
    from llmx.sharding import LAYOUTS
    from llmx.step.optimizers import OPTIMIZERS
    from llmx.sync.compressors import COMPRESSORS
    from llmx.sync.strategy import STRATEGIES

    text = MODULES["llmx.step.step"].read_text()
    words = set(re.findall(r"\w+", text))
    # The mean of gradients is what the step does without a technique.
    names = {*SCHEDULES, *LAYOUTS, *OPTIMIZERS, *COMPRESSORS, *STRATEGIES} - {"mean"}
    assert not names & words, "the step asks for a technique: make it a part of the Recipe"
