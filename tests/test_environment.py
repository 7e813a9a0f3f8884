"""environment.yml and pyproject.toml ask for the same packages, in the same ranges."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ENVIRONMENT = (ROOT / "environment.yml").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()

# conda-forge's names where they are not pip's
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "playwright": "playwright-python"}


def ranges(requirements: list[str]) -> dict[str, str]:
    parsed = [Requirement(line) for line in requirements]
    return {canonicalize_name(requirement.name): str(requirement.specifier) for requirement in parsed}


def differences(environment: str, pyproject: str) -> list[str]:
    """What one of the two files asks for and the other does not, in words."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]  # what a class or a release wants besides is its own
    by_pip = ranges(project["dependencies"] + extras["lab"] + extras["albert"] + extras["test"])
    by_pip = {CONDA_NAMES.get(name, name): specifier for name, specifier in by_pip.items()}
    content = yaml.safe_load(environment)
    listed = [line for line in content["dependencies"] if isinstance(line, str)]
    python = [line.removeprefix("python=") for line in listed if line.startswith("python=")]
    by_conda = ranges([line for line in listed if not line.startswith("python=")])
    found = []
    if by_conda.pop("pip", None) is None:
        found.append("environment.yml does not ask for pip, which installs this package")
    if [line for line in content["dependencies"] if not isinstance(line, str)] != [{"pip": ["-e ."]}]:
        found.append("environment.yml: pip is there for this package alone, as in `pip: [-e .]`")
    if content["channels"] != ["conda-forge"]:
        found.append(f"environment.yml: channels {content['channels']}, where the names are conda-forge's")
    allowed = Requirement(f"python{project['requires-python']}").specifier
    if len(python) != 1 or not allowed.contains(python[0]):
        found.append(f"environment.yml: python={python}, where pyproject.toml allows {allowed}")
    for name in sorted(by_pip | by_conda):
        if by_pip.get(name) != by_conda.get(name):
            found.append(
                f"{name}: {by_conda.get(name)} in environment.yml, {by_pip.get(name)} in pyproject.toml"
            )
    return found


def test_the_two_files_ask_for_the_same() -> None:
    assert differences(ENVIRONMENT, PYPROJECT) == []


def changes(text: str, entry: str) -> list[str]:
    """A file without the line of an entry, and with another version in it."""
    (line,) = [line for line in text.splitlines() if re.match(rf'\s*(- |"){re.escape(entry)}("|$|  #)', line)]
    changed = [text.replace(line + "\n", "")]
    version = entry.partition("=")[2].lstrip("=")
    if version:
        changed.append(text.replace(line, line.replace(version, "2.7" if "python=" in line else "99.0")))
    return changed


def test_each_change_in_one_file_alone_is_found() -> None:
    project = tomllib.loads(PYPROJECT)["project"]
    extras = project["optional-dependencies"]
    in_pyproject = project["dependencies"] + extras["lab"] + extras["albert"] + extras["test"]
    in_environment = [line for line in yaml.safe_load(ENVIRONMENT)["dependencies"] if isinstance(line, str)]
    assert len(in_environment) == len(in_pyproject) + len(["python", "pip"])
    for entry in in_pyproject:
        for changed in changes(PYPROJECT, entry):
            assert differences(ENVIRONMENT, changed), entry
    for entry in in_environment:
        for changed in changes(ENVIRONMENT, entry):
            assert differences(changed, PYPROJECT), entry


def test_a_package_or_channel_that_is_added_is_found() -> None:
    added = 'dependencies = [\n    "scipy",', "dependencies:\n  - scipy"
    assert differences(ENVIRONMENT, PYPROJECT.replace("dependencies = [", added[0], 1)) == [
        "scipy: None in environment.yml,  in pyproject.toml"
    ]
    assert differences(ENVIRONMENT.replace("dependencies:", added[1]), PYPROJECT)
    assert differences(ENVIRONMENT.replace("- -e .", "- -e .\n      - scipy"), PYPROJECT)
    assert differences(ENVIRONMENT.replace("- conda-forge", "- conda-forge\n  - defaults"), PYPROJECT)
