"""The questions of all exercises: `load` registers them with `question`.

Importing the package loads none of them, so a rank that runs one question imports only that module.
"""

from importlib import import_module

MODULES = tuple(f"q{lesson:02}" for lesson in range(21))


def load() -> None:
    """Register every question."""
    for name in MODULES:
        import_module(f"{__name__}.{name}")
