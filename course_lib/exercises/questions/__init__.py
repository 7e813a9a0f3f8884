"""The questions of all exercises: `load` registers them with `asking`.

Importing this package loads none of them: a rank that works for one question loads its module alone.
"""

from importlib import import_module

MODULES = tuple(f"q{lesson:02}" for lesson in range(1, 18))


def load() -> None:
    """Register every question."""
    for name in MODULES:
        import_module(f"{__name__}.{name}")
