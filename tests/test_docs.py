"""The examples of docs/adding.md fit the code as it is."""

import pathlib
import re
import subprocess
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding.md"
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: re.search(r"\+\+\+ b/(\S+)", diff)[1])
def test_a_diff_of_the_page_applies(diff):
    applied = subprocess.run(
        ["git", "apply", "--check", "--unidiff-zero", "--recount", "-"],
        cwd=ROOT, input=diff, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert applied.returncode == 0, applied.stderr


_CALL = re.compile(r"^\+.*?\b(phases|replicas_lib)\.(\w+)", re.MULTILINE)
CALLED = sorted(set(_CALL.findall("".join(DIFFS))))


@pytest.mark.parametrize("module, name", CALLED)
def test_what_a_diff_calls_exists(module, name):
    from llmx.sync import phases, replicas

    assert hasattr({"phases": phases, "replicas_lib": replicas}[module], name)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Files and pictures that a page names are in the repository, and so are its anchors."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        known = file.exists() and (not anchor or anchor in anchors(file))
        broken += [] if known else [target]
    assert not broken


def anchors(page: pathlib.Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_nothing_tells_to_install_the_other_project_of_this_name():
    """The name of the import belongs to a stranger on the public index."""
    assert re.sub(r"[-_.]+", "-", PROJECT["name"]).lower() != "llmx"
    told = re.compile(r"\bllmx\[\w+\]|pip3? install [^\n#]*(?<![\w./-])llmx(?![\w./-])")
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        if (ROOT / name).suffix in (".py", ".md", ".sh", ".sbatch", ".yaml", ".toml"):
            text = (ROOT / name).read_text(errors="replace")
            assert name == "tests/test_docs.py" or not told.search(text), name


def test_what_messages_say_to_install_is_what_the_extras_have():
    from llmx.data import remote

    extras = {line for group in PROJECT["optional-dependencies"].values() for line in group}
    assert {requirement for _, requirement in remote._NEEDS.values()} <= extras
    assert "lm-eval>=0.4.13" in extras and "jax[tpu,cuda13-local]" in extras
