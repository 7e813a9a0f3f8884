"""Find what a source imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator


def imports(nodes: Iterable[ast.AST], module: str, is_package: bool = False) -> Iterator[str]:
    """Yield the absolute names that a source imports, also in functions and for type checkers.

    ``from .. import x`` in ``course_lib.rank.api`` gives ``course_lib.x``, which may be a module or a name.
    """
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = [*base, *(node.module.split(".") if node.module else [])]
            yield from (".".join([*whole, name.name]) for name in node.names)
