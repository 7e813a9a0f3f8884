"""`make site`: build pages of the lessons (with their saved outputs), exercises and reference in .site/html.

Nothing is executed. Sphinx reads a copy in .site/source: pictures are files with alternative texts there, and
each notebook is listed with what its first cell says: title, time, and what it assumes.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from sphinx.cmd.build import build_main

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDS = re.compile(r"You need(?::\*\*)? (.*)")
MINUTES = re.compile(r"\*\*(?:Time:\*\* )?(\d+) minutes")
WRITTEN_OVER = re.compile(r".*\r")  # what a progress bar has overwritten in its line


def main() -> int:
    """Build the pages and return the exit status of Sphinx, for which each warning is an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / ".site")
    parser.add_argument("--as-it-is", action="store_true", help="FOLDER/source stands already")
    given = parser.parse_args()
    source = given.folder / "source"
    if not given.as_it_is:
        for made in ("source", "doctrees", "html"):
            shutil.rmtree(given.folder / made, ignore_errors=True)
        assemble(source)
    options = ["-b", "html", "-W", "--keep-going", "-q", "-c", str(HERE)]
    options += ["-D", f"html_static_path={source / '_static'}", "-d", str(given.folder / "doctrees")]
    return build_main([*options, str(source), str(given.folder / "html")])


def assemble(source: Path) -> None:
    """Copy everything that has a page, or that a page shows, into a folder."""
    pictures = source / "_static" / "pictures"
    pictures.mkdir(parents=True)
    for path in HERE.glob("*.md"):
        shutil.copy(path, source)
    shutil.copy(HERE / "site.css", source / "_static")
    for name in ("images", "scripts"):
        shutil.copytree(ROOT / "lessons" / name, source / "lessons" / name)
    (source / "exercises").mkdir()
    lessons, exercises = (sorted((ROOT / folder).glob("*.ipynb")) for folder in ("lessons", "exercises"))
    for path in [*lessons, *exercises]:
        notebook = json.loads(path.read_text())
        for_the_page(notebook, path.stem, pictures)
        (source / path.parent.name / path.name).write_text(json.dumps(notebook))
    (source / "lessons" / "index.md").write_text(contents("Lessons", OF_LESSONS, lessons))
    (source / "exercises" / "index.md").write_text(contents("Exercises", OF_EXERCISES, exercises))
    for name, (path, title) in OF_READMES.items():
        (source / name).write_text(of_readme((ROOT / path).read_text(), title))


OF_LESSONS = """Each lesson is a notebook that runs as it stands, on CPU ranks, on one GPU or on several. The
outputs that you see here were saved by runs on a machine with two cores and no GPU."""
OF_EXERCISES = """Each exercise belongs to the lesson of its number. It checks itself, on fresh ranks, in your
own notebook: these pages only show what is asked."""


def contents(title: str, words: str, notebooks: list[Path]) -> str:
    """Return a page that lists notebooks, with links, the time each takes and what it assumes."""
    rows = ["| | minutes | you need |", "| --- | ---: | --- |"]
    for path in notebooks:
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        name = first.splitlines()[0].removeprefix("# ")
        minutes, needs = MINUTES.search(first), NEEDS.search(first)
        if minutes is None:
            raise ValueError(f"{path.name}: its first cell has to say how many minutes it takes")
        assumed = needs[1] if needs else f"lesson [{path.stem[:2]}](../lessons/{path.name})"
        rows.append(f"| [{name}]({path.name}) | {minutes[1]} | {assumed} |")
    tree = "\n".join(path.stem for path in notebooks)
    return "\n".join([f"# {title}\n", words, "", *rows, "", "```{toctree}", ":hidden:", "", tree, "```", ""])


OF_READMES = {
    "teachers.md": ("exercises/README.md", "For teachers"),
    "hosts.md": (".binder/README.md", "For hosts"),
}


def of_readme(readme: str, title: str) -> str:
    """Return a folder's README as a page; links to files that the site does not show become plain text."""
    for name, (path, _) in OF_READMES.items():
        readme = readme.replace(f"](../{path})", f"]({name})")
    there = "|".join(["https?:", "#", r"\.\./lessons", *map(re.escape, OF_READMES)])
    named = re.sub(rf"\[([^\]]+)\]\((?!{there})[^)]*\)", r"\1", readme)
    return re.sub(r"\A# .*", f"# {title}", named)


def for_the_page(notebook: dict[str, Any], name: str, pictures: Path) -> None:
    """Turn pictures into files, drop overwritten text, and let a link to the exercises lead to their list."""
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = "".join(cell["source"]).replace("](../exercises)", "](../exercises/index.md)")
            continue
        cell["outputs"] = [
            each for each in cell["outputs"] if each.get("data", True)
        ]  # a dashboard's data is empty
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                number += 1
                into_a_file(output, pictures / f"{name}_{number:02}.png")
            elif output["output_type"] == "stream":
                lines = "".join(output["text"]).split("\n")
                output["text"] = "\n".join(WRITTEN_OVER.sub("", line) for line in lines)


def into_a_file(output: dict[str, Any], path: Path) -> None:
    """Move an output's picture to a file; keep the alternative text and the width that it has there."""
    data, about = output["data"], output["metadata"]["image/png"]
    path.write_bytes(base64.b64decode("".join(data.pop("image/png"))))
    width = f' width="{about["width"]}"' if "width" in about else ""
    alternative = html.escape(about["alt"])
    data["text/html"] = f'<img src="../_static/pictures/{path.name}" alt="{alternative}"{width}>'


if __name__ == "__main__":
    sys.exit(main())
