"""environment.yml and pyproject.toml ask for the same packages and ranges; constraints.txt has them all."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

# conda-forge's names where they are not pip's
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "playwright": "playwright-python"}


def ranges(requirements: list[str]) -> dict[str, str]:
    parsed = [Requirement(line) for line in requirements]
    return {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in parsed}


def test_all_files_ask_for_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]  # what a class or a release wants besides is its own
    by_pip = ranges(project["dependencies"] + extras["lab"] + extras["albert"] + extras["test"])
    assert by_pip.keys() <= ranges((ROOT / "constraints.txt").read_text().splitlines()).keys()
    by_pip = {CONDA_NAMES.get(name, name): specifier for name, specifier in by_pip.items()}

    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    (python,) = [line for line in content["dependencies"] if str(line).startswith("python=")]
    content["dependencies"].remove(python)
    content["dependencies"].remove("pip")  # which installs this package alone
    content["dependencies"].remove({"pip": ["-e ."]})
    assert ranges(content["dependencies"]) == by_pip
    assert Requirement(f"python{project['requires-python']}").specifier.contains(python.partition("=")[2])
    assert content["channels"] == ["conda-forge"], "whose names these are"
