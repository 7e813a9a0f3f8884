"""Skip a test, or fail it, if a tool that it needs is missing."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def require(tool: str, reason: str) -> str:
    """Return the path of a program; without it, skip the test, or fail it if COURSE_REQUIRE_ALL=1."""
    path = shutil.which(tool)
    if path is None:
        missing(f"{tool} is not installed: {reason}")
    return path


def missing(reason: str) -> NoReturn:
    """Skip a test that lacks something, or fail it if COURSE_REQUIRE_ALL=1 promises all that tests need."""
    if os.environ.get("COURSE_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason} (COURSE_REQUIRE_ALL=1 promises it)")
    pytest.skip(reason)
