"""`make site`: build pages of the lessons (with their saved outputs), exercises and reference in .site/html.

Nothing is executed. Sphinx reads a copy in .site/source, where pictures are files with alternative texts.
The Chinese pages are a second site, in `zh`; where a page is missing there, they link to the English one.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sphinx.cmd.build import build_main

from course_lib.exercises.progress import PARTS
from course_lib.lesson.chinese import notebook_in_chinese, page_in_chinese, translated

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
READMES = {  # the page: its file, and its title on the site
    "index.md": ("README.md", "Training with many GPUs in PyTorch"),
    "learn.md": ("lessons/README.md", "How to learn here"),
    "library.md": ("course_lib/README.md", "On your own code"),
    "teachers.md": ("exercises/README.md", "For teachers"),
    "grading.md": ("exercises/grading.md", "Grading"),
    "hosts.md": (".binder/README.md", "For hosts"),
}
PAGE_OF = {file: page for page, (file, _) in READMES.items()}
PAGE_OF |= {"exercises": "exercises/index.md", "README.zh.md": "zh/index.md"}
PAGES = ["learn", "lessons/index", "exercises/index", "library", "reference", "teachers", "grading", "hosts"]
CHINESE = "PyTorch 多卡训练"
CHINESE_PAGES = {"课": "lessons/[0-9]", "练习": "exercises/", "查一查": "lessons/symptoms|glossary"}
OF_LESSONS = """Each lesson is a notebook that runs as it stands, on CPU ranks, on one GPU or on several. The
outputs that you see here were saved by runs on a machine with two cores and no GPU; [a table](evidence.md)
says what was run where. What is *deeper* you can leave out."""
OF_EXERCISES = """Each exercise belongs to the lesson of its number. It checks itself, on fresh ranks, in your
own notebook: these pages only show what is asked."""
FOLDS = {"source_hidden": ("hide-input", "code", "代码"), "outputs_hidden": ("hide-output", "output", "输出")}
NEEDS = re.compile(r"You need(?::\*\*)? (.*)|· needs ([^·\n]*\S)")
MINUTES = re.compile(r"\*\*(?:Time:\*\* )?(\d+) minutes")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]*)(#[^)\s]*)?\)")
TO_A_CELL = re.compile(r"\]\(([^)\s]+\.ipynb)#cell-id=([^)\s]+)\)")
PICTURE = re.compile(r'<img src="([^"]+)" width="(\d+)" alt="([^"]+)">')


def main(folder: Path) -> int:
    """Build the pages and return the exit status of Sphinx, for which each warning is an error."""
    source, doctrees, pages = (folder / name for name in ("source", "doctrees", "html"))
    for old in (source, doctrees, pages):
        shutil.rmtree(old, ignore_errors=True)
    assemble(source)
    static, status = source / "_static", 0
    chinese = [f"html_static_path={static / 'site.css'}", "language=zh_CN"]
    chinese += [f"project={CHINESE}", f"html_title={CHINESE}"]
    for site, settings in {".": [f"html_static_path={static}"], "zh": chinese}.items():
        options = ["-b", "html", "-W", "--keep-going", "-q", "-c", HERE, "-d", doctrees / site]
        options += [f"-D{setting}" for setting in settings]
        status |= build_main([str(each) for each in (*options, source / site, pages / site)])
    return status


def assemble(source: Path) -> None:
    """Copy everything that has a page, or that a page shows, into a folder."""
    (source / "_static" / "pictures").mkdir(parents=True)
    shutil.copy(HERE / "site.css", source / "_static")
    lessons, exercises = (sorted(ROOT.glob(f"{name}/*.ipynb")) for name in ("lessons", "exercises"))
    lessons += ROOT.glob("lessons/deeper/*.ipynb")
    lessons.sort(key=lambda path: (path.stem[:2], path.parent.name == "deeper", path.stem))
    files = {page: ROOT / file for page, (file, _) in READMES.items()}
    files |= {path.name: path for path in HERE.glob("*.md")}
    others = (ROOT / "lessons" / name for name in ("symptoms.md", "evidence.md"))
    files |= {str(path.relative_to(ROOT)): path for path in (*lessons, *exercises, *others)}
    english = {page: path.read_text() for page, path in files.items()}
    english["index.md"] += tree([*PAGES, "glossary"])
    english["lessons/index.md"] = contents("Lessons", OF_LESSONS, lessons, "symptoms", "evidence")
    english["exercises/index.md"] = contents("Exercises", OF_EXERCISES, exercises)
    chinese = {}
    for path, blocks in translated(ROOT).items():
        if blocks.exists():
            page = path.relative_to(ROOT).as_posix().replace("solutions/", "exercises/")
            page = PAGE_OF.get(page, page.removeprefix(".ci/site/"))
            if page.endswith(".md"):
                chinese[page] = page_in_chinese(path, blocks)
            else:
                chinese[page] = json.dumps(notebook_in_chinese(json.loads(english[page]), blocks))
    for caption, names in CHINESE_PAGES.items():
        found = [page.rpartition(".")[0] for page in chinese if re.match(names, page)]
        chinese["index.md"] += tree(found, f":caption: {caption}\n")
    linked = {(f"lessons/{name}", cell) for name, cell in TO_A_CELL.findall(english["lessons/symptoms.md"])}
    sites = {source: english, source / "zh": chinese}
    for folder, texts in sites.items():
        for name in ("images", "scripts"):
            shutil.copytree(ROOT / "lessons" / name, folder / "lessons" / name)
        for page in texts:
            (folder / page).parent.mkdir(exist_ok=True)
            (folder / page).touch()  # `linked` looks for it
    for folder, texts in sites.items():
        for page, text in texts.items():
            cells = {cell for name, cell in linked if name == page}
            (folder / page).write_text(Page(page, folder, texts is chinese, cells).finished(text))


@dataclass
class Page:
    """A page: its name, its site's folder, and the cells in it that the page of symptoms links to."""

    name: str
    site: Path
    is_chinese: bool
    cells: set[str]

    def finished(self, text: str) -> str:
        """Return the page for Sphinx, made from the text of a Markdown file or a notebook."""
        if self.name.endswith(".md"):
            if self.name in READMES:
                title = CHINESE if self.is_chinese else READMES[self.name][1]
                text = re.sub(r"\A# .*", f"# {title}", text)
            return PICTURE.sub(as_image, self.linked(text))
        notebook, cells, pictures = json.loads(text), list[Any](), 0
        for cell in notebook["cells"]:
            if cell["id"] in self.cells:  # named as JupyterLab names a cell in a link
                target = f'<span id="cell-id={cell["id"]}"></span>'
                about = {"cell_type": "markdown", "id": f"to-{cell['id']}"[:64], "metadata": {}}
                cells.append(about | {"source": target})
            cells.append(cell)
            if cell["cell_type"] == "markdown":
                cell["source"] = self.linked("".join(cell["source"]))
                continue
            self.fold(cell["metadata"])
            cell["outputs"] = [each for each in cell["outputs"] if each.get("data") != {}]  # a dashboard's
            for output in cell["outputs"]:
                if "image/png" in output.get("data", {}):
                    pictures += 1
                    self.put_picture_in_file(output, f"{Path(self.name).stem}_{pictures:02}.png")
        return json.dumps(notebook | {"cells": cells})

    def linked(self, text: str) -> str:
        """Point links to this site's pages, else to English ones; of a link to another file, keep the words.

        A broken link stays: Sphinx reports it.
        """
        file = READMES[self.name][0] if self.name in READMES else self.name

        def pointed(link: re.Match[str]) -> str:
            words, target, within = link.groups(default="")
            path = os.path.normpath(os.path.join(os.path.dirname(file), target))
            page = PAGE_OF.get(path, path)
            if self.is_chinese and (page == self.name or not (self.site / page).is_file()):
                page = f"../{page}"  # the English one, also where a page links to itself
            if not (self.site / page).is_file():
                return words if (ROOT / path).exists() else link[0]
            to = os.path.relpath(page, os.path.dirname(self.name) or ".")
            if page.startswith(("../", "zh/")) or "cell-id" in within:  # unknown to Sphinx
                return f'<a href="{os.path.splitext(to)[0]}.html{within}">{words}</a>'
            return f"[{words}]({to}{within})"

        return LINK.sub(pointed, text)

    def fold(self, metadata: dict[str, Any]) -> None:
        """Fold on the page what JupyterLab folds when the notebook opens."""
        hidden = metadata.get("jupyter", {})
        if folded := [parts for name, parts in FOLDS.items() if hidden.get(name)]:
            tags, english, chinese = zip(*folded, strict=True)
            metadata["tags"] = [*metadata.get("tags", []), *tags]
            what = "和".join(chinese) if self.is_chinese else english[0] if len(folded) == 1 else "{type}"
            show, hide = ("展开", "收起") if self.is_chinese else ("Show the ", "Hide the ")
            metadata["mystnb"] = {"code_prompt_show": show + what, "code_prompt_hide": hide + what}

    def put_picture_in_file(self, output: dict[str, Any], name: str) -> None:
        """Move an output's picture to a file; keep its alternative text and its width."""
        static = "../_static" if self.is_chinese else "_static"
        data, about = output["data"], output["metadata"]["image/png"]
        (self.site / static / "pictures" / name).write_bytes(base64.b64decode("".join(data.pop("image/png"))))
        width = f' width="{about["width"]}"' if "width" in about else ""
        to = os.path.relpath(f"{static}/pictures/{name}", os.path.dirname(self.name))
        data["text/html"] = f'<img src="{to}" alt="{html.escape(about["alt"])}"{width}>'


def as_image(picture: re.Match[str]) -> str:
    path, width, alternative = picture.groups()
    return f"```{{image}} {path}\n:width: {width}px\n:alt: {' '.join(alternative.split())}\n```"


def contents(title: str, about: str, notebooks: list[Path], *others: str) -> str:
    """Return a page that lists notebooks, with links, the time each takes and what it assumes."""
    names, rows, parts = list[str](), ["| | minutes | you need |", "| --- | ---: | --- |"], dict(PARTS)
    for path in notebooks:
        number, first = path.stem[:2], "".join(json.loads(path.read_text())["cells"][0]["source"])
        if part := parts.pop(min(last for last in PARTS if number <= last), ""):  # its first notebook
            rows.append(f"| **{part}** | | |")
        names.append(str(path.relative_to(notebooks[0].parent).with_suffix("")))
        heading = first.splitlines()[0].removeprefix("# ")
        minutes, needs = MINUTES.findall(first), NEEDS.search(first)
        lesson = next(ROOT.glob(f"lessons/{number}_*.ipynb"))
        assumed = needs[1] or needs[2] if needs else f"lesson [{number}](../lessons/{lesson.name})"
        rows.append(f"| [{heading}]({names[-1]}.ipynb) | {minutes[0]} | {assumed} |")
    return "\n".join([f"# {title}\n", about, "", *rows, tree([*names, *others])])


def tree(pages: list[str], options: str = "") -> str:
    return "\n```{toctree}\n:hidden:\n" + options + "\n" + "\n".join(pages) + "\n```\n"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / ".site"))
