"""Check that everyone can read a page: the rules of WCAG, tested by axe, and the width of a phone."""

from __future__ import annotations

import importlib.util
from typing import Any

from tests.support.needs import missing

PHONE = 390  # CSS pixels
WIDTH = "document.documentElement.scrollWidth"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]


def violations(page: Any, name: str, options: dict[str, Any], within: Any = None) -> list[str]:
    """Return axe's report of a page's violations; empty if there are none."""
    if importlib.util.find_spec("axe_playwright_python") is None:
        missing("axe_playwright_python is not installed: `make setup` brings it")
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, within, {**options, "resultTypes": ["violations"], "preload": False})
    return [f"{name}: {found.generate_report()}"] if found.violations_count else []
