"""What is run of a cell that ended its process."""

from __future__ import annotations

import ast

import pytest

from course_lib.exercises.grading.answer_server import _Definitions


@pytest.mark.parametrize(
    ("source", "stays"),
    [
        ("import os", True),
        ("def first():\n    os._exit(0)", True),
        ("@made\nclass First:\n    size = made()", True),
        ("size = 3", True),
        ("size = made()", False),
        ("os._exit(0)", False),
        ("try:\n    import a\nexcept ImportError:\n    a = None\nelse:\n    pass", True),
        ("try:\n    import a\nexcept ImportError:\n    os._exit(0)", False),
        ("try:\n    os._exit(0)\nfinally:\n    import a", False),
        ("for _ in range(3):\n    import a", False),
    ],
)
def test_what_defines_something_stays(source: str, stays: bool) -> None:
    cell = _Definitions().visit(ast.parse(f"{source}\nprint(3)"))
    assert ast.unparse(cell) == (source if stays else "")
