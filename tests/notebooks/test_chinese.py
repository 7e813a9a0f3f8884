"""The Chinese edition: it fits the English, reads as Chinese does, and no build takes a learner's work."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from markdown_it import MarkdownIt
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course_lib import __main__ as command
from course_lib.exercises.generate import blank
from course_lib.lesson.chinese import OUTDATED, PAGES, blocks, build, hash_of, sections, texts, translated
from tests.notebooks.execute import ROOT, read

FILES = {file: path for path, file in translated(ROOT).items() if file.exists()}
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
TERMS = re.findall(r"(?m)^\|[^|]+\|([^|]+)\|([^|]*)\|$", (ROOT / "lessons/zh/terms.md").read_text())[2:]
FORBIDDEN = "|".join(word for _, words in TERMS for word in words.strip().split("、") if word)
RIGHT = "|".join(word for words, _ in TERMS for word in re.findall(r"[\u4e00-\u9fff]{3,}", words))
HAN = "[\u4e00-\u9fff]"
FORM = {
    "a space is missing": rf"{HAN}[A-Za-z0-9]|[A-Za-z0-9%]{HAN}",
    "half-width punctuation": rf"{HAN}[,;:?!()]|[,;:?!(]{HAN}",
    "a space before punctuation": r"[^\S\n][，。；？！、：）”]",
    "bold that is none": r"\*\*",
}
BLOCK = re.compile(r"(?ms)^<!-- (\S+) (\w{8})( reviewed)? -->\n(.*?)(?=^<!-- |\Z)")


def faults(text: str) -> list[str]:
    """Return what is wrong with the form and the words of a Chinese text, code and formulas aside."""
    lines = (block.children or [] for block in MarkdownIt().enable("table").parse(text))
    shown = {"text": lambda each: each.content, "code_inline": lambda _: "x", "softbreak": lambda _: "\n"}
    plain = "\n".join("".join(shown.get(each.type, lambda _: "")(each) for each in line) for line in lines)
    plain = re.sub(r"\$[^$\n]+\$", "x", plain)
    wrong = [f"{what}: {found[0]}" for what, form in FORM.items() for found in re.finditer(form, plain)]
    return wrong + re.findall(FORBIDDEN, re.sub(RIGHT, "", plain))


def links(text: str) -> list[str]:
    return sorted(re.findall(r"\]\(([^)\s]+)\)", text.replace("README.zh.md", "README.md")))


@each_file
def test_it_is_written_as_chinese_is(file: Path) -> None:
    assert {name: wrong for name, (_, text) in blocks(file).items() if (wrong := faults(text))} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("在 rank 0 上，`x` 是 **3**：[两块](a.md) GPU、单元格。", []),
        ("在rank 上", ["a space is missing: 在r"]),
        ("用`x` 吗？", ["a space is missing: 用x"]),
        ("好, 对", ["half-width punctuation: 好,"]),
        ("好 ，对", ["a space before punctuation:  ，"]),
        ("**练什么：**看", ["bold that is none: **", "bold that is none: **"]),
        ("| 每个秩 |\n| --- |\n| 下一个单元 |", ["秩", "单元"]),
    ],
)
def test_what_is_not_written_as_chinese_is_is_found(text: str, wrong: list[str]) -> None:
    assert faults(text) == wrong


@each_file
def test_its_links_are_those_of_the_english(file: Path) -> None:
    path = FILES[file]
    english = sections(path) if path.suffix == ".md" else texts(read(path))
    for name, (made_from, text) in blocks(file).items():
        if made_from == hash_of(english.get(name, "")):
            assert links(text) == links(english[name]), name


# --- a new hash says that somebody looked at the Chinese --------------------------------------------------


def not_looked_at(versions: list[str]) -> list[str]:
    """Return the blocks of the first, newest version whose hash is new and whose Chinese is old."""
    newest, *older = [{name: rest for name, *rest in BLOCK.findall(text)} for text in versions]
    wrong = []
    for name, (made_from, reviewed, text) in newest.items():
        before = next((old[name] for old in older if name in old and old[name][0] != made_from), None)
        if before and before[2].strip() == text.strip() and not reviewed:
            wrong.append(name)
    return wrong


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout


@each_file
def test_no_hash_is_renewed_alone(file: Path) -> None:
    name = file.relative_to(ROOT).as_posix()
    try:
        commits = git("log", "-n9", "--format=%H", "--", name).split()
        older = [git("show", f"{commit}:./{name}") for commit in commits]
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"there is no history of git: {error}")
    assert not_looked_at([file.read_text(), *older]) == []


def test_a_hash_that_is_renewed_alone_is_found() -> None:
    newest_first: list[str] = []
    for heading, text, wrong in (
        ("a 00000001", "一", []),
        ("a 00000002", "一", ["a"]),
        ("a 00000002 reviewed", "一", []),
        ("a 00000003", "二", []),
        ("a 00000004", "二", ["a"]),
        ("a 00000004", "三", []),
    ):
        newest_first.insert(0, f"<!-- {heading} -->\n{text}\n\n<!-- b 00000000 -->\n不变\n")
        assert not_looked_at(newest_first) == wrong


# --- the notebooks ----------------------------------------------------------------------------------------


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in read(path).cells if cell.cell_type == kind]


def test_the_edition_differs_from_the_english_in_its_text_alone(tmp_path: Path) -> None:
    for name in ("lessons", "exercises", "solutions", "README.md", "README.zh.md", ".ci"):
        (tmp_path / name).symlink_to(ROOT / name)
    assert build(tmp_path, blank) == []
    for path in [*(ROOT / "lessons").glob("*.ipynb"), *(ROOT / "exercises").glob("*.ipynb")]:
        made = tmp_path / "zh" / path.relative_to(ROOT)
        nbformat.validate(nbformat.read(made, 4))
        assert cells(made, "code") == cells(path, "code"), path.stem
        assert [cell.id for cell in read(made).cells] == [cell.id for cell in read(path).cells]
        translated_here = read(made).cells[0].source != read(path).cells[0].source
        assert translated_here == (ROOT / "lessons" / "zh" / f"{path.stem}.md").exists()
    for name in ("scripts/common.py", "recorded/gpu", "deeper/00_what_launch_does.ipynb", "evidence.md"):
        assert (tmp_path / "zh" / "lessons" / name).resolve() == ROOT / "lessons" / name
    assert (tmp_path / "zh" / "lessons" / "symptoms.md").read_text().startswith("# 症状")


LESSON, BLOCKS, MADE = "lessons/01_a.ipynb", "lessons/zh/01_a.md", "zh/lessons/01_a.ipynb"


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout, which is the current folder."""
    for page, file in PAGES.items():
        for path, text in ((page, "# Page"), (file, f"<!-- 00 {hash_of('# Page')} -->\n# 页\n")):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    write(tmp_path / LESSON, "# Lesson", "Text")
    texts_of = {"m0": ("# Lesson", "# 课"), "m1": ("Text", "正文")}
    headed = (f"<!-- {name} {hash_of(english)} -->\n{text}\n" for name, (english, text) in texts_of.items())
    (tmp_path / BLOCKS).write_text("\n".join(headed))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, *written: str, printed: str = "2") -> None:
    code = new_code_cell("1 + 1", id="c", outputs=[new_output("stream", text=printed)])
    markdown = [new_markdown_cell(text, id=f"m{at}") for at, text in enumerate(written)]
    nbformat.write(new_notebook(cells=[*markdown, code]), path)


def changed(path: Path, source: str = "", printed: str = "") -> str:
    """Change a notebook as a learner does, and return all of it."""
    there = nbformat.read(path, 4)
    if source:
        there.cells[-1].source = source
    if printed:
        there.cells[-1].outputs[0].text = printed
    there.cells.append(new_code_cell())  # as JupyterLab does after the last one
    nbformat.write(there, path)
    return path.read_text()


def shown(path: Path) -> list[str]:
    return [cell.source for cell in cells(path, "markdown")]


def test_english_that_is_newer_is_shown_below_a_mark_and_named(
    course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (command.main(["zh"]), command.main(["zh", "--stale"])) == (0, 0)
    assert shown(course / MADE) == ["# 课", "正文"]
    write(course / LESSON, "# Lesson", "Newer text", "More")
    (course / "README.md").write_text("# Newer page")
    capsys.readouterr()
    assert (command.main(["zh"]), command.main(["zh", "--stale"])) == (0, 1)
    assert shown(course / MADE) == ["# 课", f"{OUTDATED}Newer text", f"{OUTDATED}More"]
    told = capsys.readouterr().out
    assert f"{BLOCKS}: <!-- m1 {hash_of('Newer text')} -->\n\nNewer text\n\n正文\n" in told
    assert f"{BLOCKS}: <!-- m2 {hash_of('More')} -->\n\nMore\n" in told
    assert f"README.zh.md: <!-- 00 {hash_of('# Newer page')} -->\n\n# Newer page\n\n# 页\n" in told
    assert told.count("<!--") == 3


def test_a_learners_work_outlives_each_build(course: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["zh"])
    run = changed(course / MADE, printed="my output")
    command.main(["zh"])
    assert (course / MADE).read_text() == run, "nothing is new"

    write(course / LESSON, "# Lesson", "Text", "More")
    command.main(["zh"])
    assert "More" in (course / MADE).read_text(), "the learner has only run it"

    mine = changed(course / MADE, source="2 + 2")
    capsys.readouterr()
    command.main(["zh"])
    assert "stays" not in capsys.readouterr().out, "nothing is new"
    write(course / LESSON, "# Lesson", "Text")
    command.main(["zh"])
    assert (course / MADE).read_text() == mine
    assert f"{MADE} stays as you changed it" in capsys.readouterr().out


@pytest.mark.parametrize("name", [LESSON, MADE])
def test_a_notebook_that_is_cut_short_is_told_in_a_sentence(
    name: str, course: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(["zh"])
    (course / name).write_text((course / name).read_text()[:200])
    capsys.readouterr()
    assert command.main(["zh"]) == 2
    assert (
        capsys.readouterr().err == f"course zh: {name} is cut short, or no notebook: restore or rename it\n"
    )
    assert len((course / name).read_text()) == 200


def test_without_a_checkout_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["zh"], ["zh", "--stale"]):
        assert command.main(words) == 2
        assert "run this where the course is checked out" in capsys.readouterr().err
