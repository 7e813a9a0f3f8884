"""The questions of all exercises: importing this registers them with `check`."""

from . import q02, q04, q06  # noqa: F401
