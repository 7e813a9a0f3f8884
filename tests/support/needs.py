"""What to do where a tool that a test needs is missing."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def require(tool: str, reason: str) -> str:
    """The path of a program; without it the test is skipped, or fails where all of them are promised."""
    path = shutil.which(tool)
    if path is None:
        missing(f"{tool} is not installed: {reason}")
    return path


def missing(reason: str) -> NoReturn:
    """Skip a test for want of something; or fail, where all that tests need is promised."""
    if os.environ.get("COURSE_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason} (COURSE_REQUIRE_ALL=1 promises it)")
    pytest.skip(reason)
