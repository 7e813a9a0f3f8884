"""Lesson 20's two groups of torchft: one is killed and healed, and what is told where torchft is missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.needs import missing

LESSONS = Path(__file__).parents[2] / "lessons"
HAS_TORCHFT = importlib.util.find_spec("torchft") is not None


@pytest.fixture
def heal(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(LESSONS)
    monkeypatch.chdir(LESSONS / "deeper")  # where its notebook runs
    return importlib.import_module("scripts.heal")


@pytest.fixture
def hosts(heal: Any) -> Iterator[Any]:
    two_hosts = importlib.import_module("scripts.two_hosts")
    if reason := two_hosts.why_not():
        missing(f"two hosts in namespaces: {reason}")
    with two_hosts.TwoHosts() as made:
        yield made


@pytest.mark.skipif(not HAS_TORCHFT, reason="torchft is an extra of the course: pip install -e '.[heal]'")
def test_the_other_group_goes_on_and_heals_the_one_that_was_killed(heal: Any, hosts: Any) -> None:
    told = heal.lose_and_heal(hosts)
    together = defaultdict(list)
    for line in told["lines"]:
        if line["groups"] == 2 and line["committed"] > line["step"]:
            together[line["committed"]].append((line["step"], line["weights"]))
    assert len(together[heal.STEPS]) == 2
    for committed, both in together.items():
        assert both == [(committed - 1, both[0][1])] * 2, "a step later, on the batch of that step, and equal"


@pytest.mark.skipif(HAS_TORCHFT, reason="torchft is installed")
def test_without_torchft_it_is_said_what_is_missing(heal: Any, hosts: Any) -> None:
    assert "pip install -e '.[heal]'" in heal.why_not()
    with pytest.raises(RuntimeError, match="No module named 'torchft'"):
        heal.lose_and_heal(hosts)
