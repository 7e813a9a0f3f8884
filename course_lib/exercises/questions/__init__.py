"""The questions of all exercises: importing this registers them with `asking`."""

from . import (  # noqa: F401
    q01,
    q02,
    q03,
    q04,
    q05,
    q06,
    q07,
    q08,
    q09,
    q10,
    q11,
    q12,
    q13,
    q14,
    q15,
    q16,
    q17,
)
