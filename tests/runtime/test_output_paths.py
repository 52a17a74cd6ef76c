"""`output_paths`: what is said of a path before a command works."""

import os

import pytest

from llmx.runtime import output_paths
from llmx.runtime.output_paths import file_problems, folder_problems


def test_paths_that_can_be_written_have_no_problems(tmp_path):
    (tmp_path / "there.html").touch()
    for path in ("", f"{tmp_path}/new.html", f"{tmp_path}/there.html"):
        assert file_problems("--html", path) == []
    for path in ("", str(tmp_path), f"{tmp_path}/a/b"):
        assert folder_problems("--save-hlo", path) == []


@pytest.mark.parametrize(
    ("find", "path", "words"),
    [
        (file_problems, "", "is a folder: name a file"),
        (file_problems, "/none/x", "/none does not exist: create it"),
        (file_problems, "/file/x", "/file does not exist: create it"),
        (folder_problems, "/file", "/file cannot be written to: use another folder"),
        (folder_problems, "/file/a/b", "/file cannot be written to: use another folder"),
    ],
)
def test_a_path_that_cannot_be_written_is_explained(find, path, words, tmp_path):
    (tmp_path / "file").touch()
    (problem,) = find("--out", f"{tmp_path}{path}")
    assert problem.startswith(f"--out={tmp_path}{path}") and words in problem


def test_what_is_closed_to_this_user_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    (tmp_path / "file").touch()
    assert "use another file" in file_problems("--html", f"{tmp_path}/file")[0]
    assert "use another folder" in file_problems("--html", f"{tmp_path}/new")[0]
    assert "use another folder" in folder_problems("--save-hlo", f"{tmp_path}/new")[0]


@pytest.mark.parametrize(("names", "is_free"), [
    ([], True), (["owner.json"], True), (["owner.json", output_paths.UNFINISHED, "part"], True),
    (["notes.txt"], False), (["config.json"], False), ([output_paths.UNFINISHED, "last"], False),
])  # fmt: skip
def test_only_what_a_killed_command_left_may_be_replaced(tmp_path, names, is_free):
    for name in names:
        (tmp_path / name).touch()
    for last, expected in (("last", is_free), ("", is_free and "part" not in names)):
        try:
            output_paths.require_new(tmp_path, last=last, besides=["owner.json"])
        except ValueError as error:
            assert not expected and f"{tmp_path} exists and is not empty" in str(error)
        else:
            assert expected


def test_a_file_or_a_broken_link_is_no_new_folder(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    output_paths.require_new(tmp_path / "new")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match="export into a new directory"):
            output_paths.require_new(tmp_path / name)
