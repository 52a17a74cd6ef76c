"""The count of the lines on the path of one plain step."""

import importlib.util
import pathlib

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "count_path.py"

SOURCE = '''"""A docstring
of two lines."""

import math  # 1

# a comment


class Point:  # 2
    """A point."""

    x: int = (  # 3, 4, 5
        1
    )
    text = """not a docstring
    but two lines"""  # 6, 7


def area():  # 8
    "One line."
    return math.pi  # 9
'''


def load():
    spec = importlib.util.spec_from_file_location("count_path", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lines_of_code_are_those_without_blanks_comments_and_docstrings():
    assert load().code_lines(SOURCE) == {4, 9, 12, 13, 14, 15, 16, 19, 21}


def test_the_path_is_made_of_files_that_exist():
    count_path = load()
    for name in count_path.PATH:
        assert count_path.code_lines((count_path.PACKAGE / name).read_text()), name
