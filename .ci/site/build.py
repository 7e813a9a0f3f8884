"""`make site`: build pages of the lessons (with their saved outputs), exercises and reference in .site/html.

Nothing is executed. Sphinx reads a copy in .site/source: pictures are files with alternative texts there, and
each notebook is listed with what its first cell says: title, time, and what it assumes. The Chinese pages are
a site in its folder `zh`, whose links lead to English pages where there are no Chinese ones.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from sphinx.cmd.build import build_main

from course_lib.exercises.progress import PARTS
from course_lib.lesson.chinese import notebook_in_chinese, page_in_chinese, translated

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDS = re.compile(r"You need(?::\*\*)? (.*)|· needs ([^·\n]*\S)")
MINUTES = re.compile(r"\*\*(?:Time:\*\* )?(\d+) minutes")
FOLDS = {"source_hidden": ("hide-input", "code"), "outputs_hidden": ("hide-output", "output")}
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
    read, html, static = given.folder / "doctrees", given.folder / "html", source / "_static"
    english = ["-D", f"html_static_path={static}", "-d", str(read), str(source), str(html)]
    status = build_main([*options, *english])
    if (source / "zh").exists():
        options += ["-D", "language=zh_CN", "-D", f"project={CHINESE}", "-D", f"html_title={CHINESE}"]
        options += ["-D", f"html_static_path={static / 'site.css'}", "-d", str(read / "zh")]
        status |= build_main([*options, str(source / "zh"), str(html / "zh")])
    return status


def assemble(source: Path) -> None:
    """Copy everything that has a page, or that a page shows, into a folder."""
    pictures = source / "_static" / "pictures"
    pictures.mkdir(parents=True)
    for path in HERE.glob("*.md"):
        shutil.copy(path, source)
    shutil.copy(HERE / "site.css", source / "_static")
    for name in ("images", "scripts"):
        shutil.copytree(ROOT / "lessons" / name, source / "lessons" / name)
    shutil.copy(ROOT / "lessons" / "evidence.md", source / "lessons")
    for name in ("lessons/deeper", "exercises"):
        (source / name).mkdir()
    symptoms = (ROOT / "lessons" / "symptoms.md").read_text()
    linked = {(name, cell) for _, name, _, cell in TO_A_CELL.findall(symptoms)}
    lessons, exercises = (sorted((ROOT / folder).glob("*.ipynb")) for folder in ("lessons", "exercises"))
    lessons = sorted([*lessons, *(ROOT / "lessons" / "deeper").glob("*.ipynb")], key=after_its_lesson)
    for path in [*lessons, *exercises]:
        notebook = json.loads(path.read_text())
        for_the_page(notebook, path, pictures)
        name_cells(notebook, {cell for name, cell in linked if ROOT / "lessons" / f"{name}.ipynb" == path})
        (source / path.relative_to(ROOT)).write_text(json.dumps(notebook))
    (source / "lessons" / "index.md").write_text(contents("Lessons", OF_LESSONS, lessons))
    (source / "exercises" / "index.md").write_text(contents("Exercises", OF_EXERCISES, exercises))
    (source / "lessons" / "symptoms.md").write_text(TO_A_CELL.sub(r'<a href="\2.html#\3">\1</a>', symptoms))
    for name, (path, title) in OF_READMES.items():
        text = of_readme((ROOT / path).read_text(), path, title, source)
        (source / name).write_text(text + (CONTENTS if name == "index.md" else ""))
    assemble_chinese(source / "zh", pictures, linked)


CHINESE = "PyTorch 多卡训练"
CHINESE_TREES = {"课": "lessons/[0-9]", "练习": "exercises/", "查一查": "lessons/symptoms|glossary"}


def assemble_chinese(source: Path, pictures: Path, linked: set[tuple[str, str]]) -> None:
    """Do the same for the Chinese pages, in the folder `zh` of the English ones."""
    for name in ("images", "scripts"):
        shutil.copytree(ROOT / "lessons" / name, source / "lessons" / name)
    (source / "exercises").mkdir()
    pages = {}
    for path, blocks in translated(ROOT).items():
        if blocks.exists():
            page = path.relative_to(ROOT).as_posix().replace("solutions/", "exercises/")
            page = {"README.md": "index.md"}.get(page, page.removeprefix(".ci/site/"))
            pages[page] = path, blocks
            (source / page).touch()  # links to it find it
    for page, (path, blocks) in pages.items():
        if page.endswith(".md"):
            text = lead_on(page_in_chinese(path, blocks), page, source)
        else:
            notebook = notebook_in_chinese(json.loads((ROOT / page).read_text()), blocks)
            for cell in notebook["cells"]:
                if cell["cell_type"] == "markdown":
                    cell["source"] = lead_on("".join(cell["source"]), page, source)
            for_the_page(notebook, ROOT / page, pictures, chinese=True)
            name_cells(notebook, {cell for name, cell in linked if page == f"lessons/{name}.ipynb"})
            text = json.dumps(notebook)
        (source / page).write_text(text)
    index = of_readme((source / "index.md").read_text(), "README.md", CHINESE, source)
    for caption, names in CHINESE_TREES.items():
        tree = "\n".join(page.rpartition(".")[0] for page in pages if re.match(names, page))
        index += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{tree}\n```\n"
    (source / "index.md").write_text(index)


def lead_on(text: str, page: str, source: Path) -> str:
    """Lead the links of a Chinese page to Chinese pages, or to English ones, or nowhere."""
    folder = os.path.dirname(page)

    def there(link: re.Match[str]) -> str:
        words, target, within = link.groups(default="")
        file = os.path.normpath(os.path.join(folder, target))
        file = PAGE_OF.get(file, file)
        up = "" if (source / file).is_file() and file != page else "../"  # of itself, the English
        if not (source / up / file).is_file():
            return words
        to = os.path.relpath(up + file, folder or ".")
        if up or within:
            return f'<a href="{os.path.splitext(to)[0]}.html{within}">{words}</a>'
        return f"[{words}]({to})"

    return LINK.sub(there, text)


def after_its_lesson(path: Path) -> tuple[str, bool, str]:
    return path.stem[:2], path.parent.name == "deeper", path.stem


OF_LESSONS = """Each lesson is a notebook that runs as it stands, on CPU ranks, on one GPU or on several. The
outputs that you see here were saved by runs on a machine with two cores and no GPU; [a table](evidence.md)
says what was run where. What is *deeper* you can leave out."""
OF_EXERCISES = """Each exercise belongs to the lesson of its number. It checks itself, on fresh ranks, in your
own notebook: these pages only show what is asked."""


CONTENTS = """
```{toctree}
:hidden:

learn
lessons/index
exercises/index
library
reference
teachers
grading
hosts
glossary
```
"""


def contents(title: str, words: str, notebooks: list[Path]) -> str:
    """Return a page that lists notebooks, with links, the time each takes and what it assumes."""
    rows = ["| | minutes | you need |", "| --- | ---: | --- |"]
    names = [str(path.relative_to(notebooks[0].parent).with_suffix("")) for path in notebooks]
    parts = dict(PARTS)
    for path, file in zip(notebooks, names, strict=True):
        if part := parts.pop(min(last for last in PARTS if path.stem[:2] <= last), ""):  # not yet begun
            rows.append(f"| **{part}** | | |")
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        name = first.splitlines()[0].removeprefix("# ")
        minutes, needs = MINUTES.search(first), NEEDS.search(first)
        if minutes is None:
            raise ValueError(f"{path.name}: its first cell has to say how many minutes it takes")
        lesson = next((ROOT / "lessons").glob(f"{path.stem[:2]}_*.ipynb"))
        assumed = needs[1] or needs[2] if needs else f"lesson [{path.stem[:2]}](../lessons/{lesson.name})"
        rows.append(f"| [{name}]({file}.ipynb) | {minutes[1]} | {assumed} |")
    tree = "\n".join([*names, *(["symptoms", "evidence"] if title == "Lessons" else [])])
    return "\n".join([f"# {title}\n", words, "", *rows, "", "```{toctree}", ":hidden:", "", tree, "```", ""])


OF_READMES = {  # the page: its file, and its title there
    "index.md": ("README.md", "Training with many GPUs in PyTorch"),
    "learn.md": ("lessons/README.md", "How to learn here"),
    "library.md": ("course_lib/README.md", "On your own code"),
    "teachers.md": ("exercises/README.md", "For teachers"),
    "grading.md": ("exercises/grading.md", "Grading"),
    "hosts.md": (".binder/README.md", "For hosts"),
}
PAGE_OF = {path: name for name, (path, _) in OF_READMES.items()} | {"exercises": "exercises/index.md"}
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]*)(#[^)\s]*)?\)")
TO_A_CELL = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\.ipynb#(cell-id=([^)\s]+))\)")
PICTURE = re.compile(r'<img src="([^"]+)" width="(\d+)" alt="([^"]+)">')


def of_readme(text: str, path: str, title: str, source: Path) -> str:
    """Return the text of a README as a page; links to files that the site does not show become plain text."""

    def there(link: re.Match[str]) -> str:
        words, target, within = link.groups()
        file = os.path.normpath(Path(path).parent / target)
        if file == "README.zh.md":
            return f'<a href="zh/index.html">{words}</a>'
        page = PAGE_OF.get(file, file if (source / file).is_file() else "")
        return f"[{words}]({page}{within or ''})" if page else words

    text = LINK.sub(there, text)
    text = PICTURE.sub(
        lambda found: "```{{image}} {}\n:width: {}px\n:alt: {}\n```".format(
            *found.group(1, 2), " ".join(found[3].split())
        ),
        text,
    )
    return re.sub(r"\A# .*", f"# {title}", text)


def for_the_page(notebook: dict[str, Any], path: Path, pictures: Path, chinese: bool = False) -> None:
    """Turn pictures into files, drop overwritten text, fold cells, and link to pages that stand elsewhere."""
    number, up = 0, "../" * (len(path.parent.relative_to(ROOT).parts) + chinese)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"]).replace("../exercises)", "../exercises/index.md)")
            cell["source"] = text.replace("../lessons/README.md", "../learn.md")
            continue
        fold(cell["metadata"], chinese)
        cell["outputs"] = [each for each in cell["outputs"] if each.get("data", True)]  # a dashboard has none
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                number += 1
                into_a_file(output, pictures / f"{path.stem}_{number:02}.png", up)
            elif output["output_type"] == "stream":
                lines = "".join(output["text"]).split("\n")
                output["text"] = "\n".join(WRITTEN_OVER.sub("", line) for line in lines)


def name_cells(notebook: dict[str, Any], linked: set[str]) -> None:
    """Put a target before each cell that the symptoms link to, named as JupyterLab names a cell in a link."""
    for at, cell in reversed(list(enumerate(notebook["cells"]))):
        if cell["id"] in linked:
            target = f'<span id="cell-id={cell["id"]}"></span>'
            named = {"cell_type": "markdown", "id": f"to-{cell['id']}"[:64], "metadata": {}, "source": target}
            notebook["cells"].insert(at, named)


def fold(metadata: dict[str, Any], chinese: bool) -> None:
    """Fold on the page what JupyterLab folds when the notebook opens."""
    folded = [FOLDS[name] for name, hidden in metadata.get("jupyter", {}).items() if hidden and name in FOLDS]
    if folded:
        metadata["tags"] = [*metadata.get("tags", []), *(tag for tag, _ in folded)]
        what = folded[0][1] if len(folded) == 1 else "{type}"  # which is then the source, and the outputs
        show, hide = f"Show the {what}", f"Hide the {what}"
        if chinese:
            what = {"code": "代码", "output": "输出"}.get(what, "代码和输出")
            show, hide = f"展开{what}", f"收起{what}"
        metadata["mystnb"] = {"code_prompt_show": show, "code_prompt_hide": hide}


def into_a_file(output: dict[str, Any], path: Path, up: str) -> None:
    """Move an output's picture to a file; keep the alternative text and the width that it has there."""
    data, about = output["data"], output["metadata"]["image/png"]
    path.write_bytes(base64.b64decode("".join(data.pop("image/png"))))
    width = f' width="{about["width"]}"' if "width" in about else ""
    alternative = html.escape(about["alt"])
    data["text/html"] = f'<img src="{up}_static/pictures/{path.name}" alt="{alternative}"{width}>'


if __name__ == "__main__":
    sys.exit(main())
