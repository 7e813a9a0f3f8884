"""The questions of all exercises: importing this registers them with `check`."""

from . import q02, q06, q10  # noqa: F401
