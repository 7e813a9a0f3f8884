"""`course zh`: make the Chinese edition in `zh/`: the English notebooks, with the Chinese text that exists.

`lessons/zh` has the Chinese, in files of blocks. A block's heading, `<!-- name hash -->`, names a Markdown
cell, or gives the number of a page's section, and has the hash of the English text that the block translates.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..files import write_whole

HEADING = re.compile(r"(?m)^<!-- (\S+) ([0-9a-f]{8})(?: reviewed)? -->\n")
OUTDATED = "> 英文已更新，中文待更新。\n\n"  # above a text whose Chinese is missing or older
SYMPTOMS = "lessons/symptoms.md"
PAGES = {
    SYMPTOMS: "lessons/zh/symptoms.md",
    ".ci/site/glossary.md": "lessons/zh/glossary.md",
    "README.md": "README.zh.md",
}


def translated(root: Path) -> dict[Path, Path]:
    """Return, for each lesson, solution and page of a checkout, its file of blocks, which may be missing."""
    chinese = root / "lessons" / "zh"
    if not chinese.is_dir():
        raise FileNotFoundError(f"there is no folder {chinese}: run this where the course is checked out")
    places = {"lessons": chinese, "solutions": chinese / "exercises"}
    notebooks = (path for folder in places for path in sorted((root / folder).glob("*.ipynb")))
    found = {path: places[path.parent.name] / f"{path.stem}.md" for path in notebooks}
    return found | {root / page: root / file for page, file in PAGES.items()}


def notebook(path: Path, text: str | None = None) -> dict[str, Any]:
    """Return a notebook, from ``text`` instead of the file if it is given."""
    try:
        found = json.loads(path.read_text("utf-8") if text is None else text)
        texts(found), written(found), found["metadata"].get("course_zh")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OSError(f"{path} is cut short, or no notebook: restore or rename it") from None
    return found


def texts(found: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a notebook, by cell."""
    cells = (cell for cell in found["cells"] if cell["cell_type"] == "markdown")
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def written(found: dict[str, Any]) -> str:
    """Return a hash of what people wrote in a notebook, without the empty cells that JupyterLab appends."""
    sources = ((cell["cell_type"], "".join(cell["source"])) for cell in found["cells"])
    return hash_of(json.dumps([each for each in sources if each[1].strip()]))


def hash_of(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def sections(page: Path) -> dict[str, str]:
    """Return the texts of a page, by number: each begins with a second-level heading."""
    parts = re.split(r"(?m)^(?=## )", page.read_text("utf-8"))
    return {f"{number:02}": part.strip() for number, part in enumerate(parts)}


def blocks(file: Path) -> dict[str, tuple[str, str]]:
    """Return the hash and the Chinese of each block, by name."""
    parts = HEADING.split(file.read_text("utf-8"))[1:]
    return {parts[at]: (parts[at + 1], parts[at + 2].strip()) for at in range(0, len(parts), 3)}


def in_chinese(english: dict[str, str], file: Path) -> dict[str, str]:
    """Return the texts in Chinese; where no block fits, the English below a mark."""
    have = {made_from: chinese for made_from, chinese in blocks(file).values()}
    return {name: have.get(hash_of(text), OUTDATED + text) for name, text in english.items()}


def page_in_chinese(page: Path, file: Path) -> str:
    return "\n\n".join(in_chinese(sections(page), file).values()) + "\n"


def notebook_in_chinese(found: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the notebook with its texts in Chinese, or as it is if there is no file of blocks."""
    chinese = in_chinese(texts(found), file) if file.exists() else {}
    cells = [cell | {"source": chinese.get(cell.get("id"), cell["source"])} for cell in found["cells"]]
    return found | {"cells": cells}


def outdated(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield, for each block that does not fit, the heading that it needs, the English, and the Chinese."""
    for path, file in translated(root).items():
        english = sections(path) if path.suffix == ".md" else texts(notebook(path))
        have = blocks(file) if file.exists() else {}
        for name in {**english, **have} if file.exists() else ():
            made_from, chinese = have.get(name, ("", ""))
            text = english.get(name, "")
            if made_from != hash_of(text):
                yield f"{file}: <!-- {name} {hash_of(text)} -->", text or "This text is gone.", chinese


def build(root: Path, exercise: Callable[[Path], str]) -> list[Path]:
    """Make the Chinese edition, or renew it; ``exercise`` turns a solution into its exercise.

    A notebook in which a learner has written stays; return those that are out of date for this reason.
    """
    kept = []
    for path, file in translated(root).items():
        if path.suffix == ".ipynb":
            is_lesson = path.parent.name == "lessons"
            made = root / "zh" / ("lessons" if is_lesson else "exercises") / path.name
            found = notebook(path, None if is_lesson else exercise(path))
            if not write(made, notebook_in_chinese(found, file)):
                kept.append(made)
    made = root / "zh" / SYMPTOMS
    write_whole(made, page_in_chinese(root / SYMPTOMS, root / PAGES[SYMPTOMS]))
    for path in [*(root / "lessons").glob("[!.]*"), *(root / "exercises").glob("*.md")]:  # for code and links
        link = root / "zh" / path.relative_to(root)
        if path.suffix != ".ipynb" and path.name != "zh" and not os.path.lexists(link):
            link.symlink_to(os.path.relpath(path, link.parent))
    return kept


def write(path: Path, found: dict[str, Any]) -> bool:
    """Write a notebook that differs from the last one made; return False if a learner has written in that."""
    made = {"all": hash_of(json.dumps(found)), "written": written(found)}
    if path.exists():
        last = notebook(path)
        before = last["metadata"].get("course_zh", {})
        if before.get("all") == made["all"]:
            return True
        if before.get("written") != written(last):
            return False
    path.parent.mkdir(parents=True, exist_ok=True)
    found["metadata"]["course_zh"] = made
    write_whole(path, json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    return True
