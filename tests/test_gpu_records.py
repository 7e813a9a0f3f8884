"""What `make gpu ARGS="--keep gpu.zip"` refuses of a stranger's archive, each with its sentence; `record()`.

No GPU has made any of these: the records are imitated, in the form that `tests.gpu.figures` gives them.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import figures, records
from tests.gpu.records import Refused, checked, files_in
from tests.notebooks.execute import ROOT
from tests.support.gpu_records import PICTURE, made, png
from tests.support.processes import wait_for


def sentence(record: Any, name: str = "01_transfer_bandwidth", picture: bytes = PICTURE) -> str:
    """Why a record is not kept; "" if it is."""
    content = record if isinstance(record, bytes) else json.dumps(record).encode()
    try:
        checked(name, {"json": content, "png": picture})
    except Refused as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_record_of_each_figure_is_kept(name: str) -> None:
    assert sentence(made(name), name) == ""


def test_each_figure_has_a_rule_of_what_is_plausible() -> None:
    assert records.PLAUSIBLE.keys() == figures.FIGURES.keys()


def test_a_record_has_what_a_figure_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "lessons")
    written = importlib.import_module("scripts.helpers").GPU_RECORD
    assert records.KINDS.keys() == written.keys()
    assert figures.facts().keys() <= written.keys()


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(record: dict[str, Any]) -> None:
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = value

    return change


SECONDS = ("numbers", "seconds", "to the device, pinned")
DEEP: Any = 1
for _ in range(9):
    DEEP = [DEEP]
TOMORROW = (datetime.date.today() + datetime.timedelta(days=2)).isoformat()
REFUSED = {
    "no GPU": (put("gpus", value=0), "a rehearsal made it, without a GPU"),
    "a CPU": (
        put("device", value="a CPU, in a rehearsal"),
        "its 'device' is 'a CPU, in a rehearsal', which is not possible",
    ),
    "an imitation": (put("device", value="imitated"), "its 'device' is 'imitated', which is not possible"),
    "no driver": (put("driver", value="none"), "its 'driver' is 'none', which is not possible"),
    "no CUDA": (put("cuda", value="none"), "its 'cuda' is 'none', which is not possible"),
    "no version of torch": (lambda record: record.pop("torch"), "it has no 'torch'"),
    "an old torch": (
        put("torch", value="1.13.1"),
        f"it was made with torch 1.13.1; the course allows {made()['torch'][:-2]} or newer",
    ),
    "an old Python": (
        put("python", value="3.10.2"),
        "it was made with python 3.10.2; the course allows 3.11 or newer",
    ),
    "no version of the course": (lambda record: record.pop("course"), "it has no 'course'"),
    "another course": (
        put("course", value="0.0.1"),
        f"it was made with version 0.0.1 of the course; this is {records.PROJECT['version']}",
    ),
    "a line break": (
        put("device", value="NVIDIA\nA100"),
        "its 'device' is 'NVIDIA\\nA100', which is not possible",
    ),
    "HTML": (put("alt", value="<script>"), "its 'alt' is '<script>', which is not possible"),
    "a long text": (put("alt", value="x" * 3000), f"its 'alt' is '{'x' * 100}', which is not possible"),
    "no whole number": (put("gpus", value=True), "its 'gpus' is 'True', which is not possible"),
    "too many GPUs": (put("gpus", value=99), "it is of 99 GPUs in one machine"),
    "no day": (put("date", value="2026-02-31"), "there is no date 2026-02-31"),
    "the future": (put("date", value=TOMORROW), f"its date, {TOMORROW}, is in the future"),
    "another figure": (
        put("figure", value="02_batch_size"),
        "it is of the figure '02_batch_size', in the place of 01_transfer_bandwidth",
    ),
    "more than a record has": (put("code", value="import os"), "it has 'code', which is in no record"),
    "another picture": (
        put("picture_sha256", value="0" * 64),
        f"its picture is another one: {hashlib.sha256(PICTURE).hexdigest()[:12]}…, not 000000000000…",
    ),
    "another form": (
        put("numbers", value={"KiB": [1]}),
        "its numbers do not have the form of 01_transfer_bandwidth: KeyError: 'seconds'",
    ),
    "lists of two lengths": (
        put(*SECONDS, value=[1e-5]),
        "its numbers do not have the form of 01_transfer_bandwidth: ValueError: zip() argument 2 is shorter "
        "than argument 1",
    ),
    "a text for a number": (
        put(*SECONDS, 0, value="fast"),
        "to the device, pinned, 1 KiB, seconds: 'fast' is no number",
    ),
    "no time at all": (
        put(*SECONDS, 0, value=0.0),
        "to the device, pinned, 1 KiB, seconds: 0 is not plausible (1e-09 to 60 is)",
    ),
    "more than the interface can": (
        put(*SECONDS, 1, value=1e-5),
        "to the device, pinned, 1024 KiB, GB/s: 104.858 is not plausible (0 to 15.75 is)",
    ),
    "a second GPU from nowhere": (
        put("numbers", "seconds", value={"device to device": [1e-5, 1e-4]}),
        "it is of 1 GPU, and has transfers from device to device",
    ),
    "an infinite number": (put(*SECONDS, 0, value=1e999), "it has Infinity where a number should be"),
    "too deep": (
        put("numbers", "more", value=DEEP),
        "its numbers are more than 20,000, or more than 8 levels deep",
    ),
    "too many": (
        put("numbers", "KiB", value=[1] * 20_001),
        "its numbers are more than 20,000, or more than 8 levels deep",
    ),
    "a long text among the numbers": (
        put("numbers", "more", value="x" * 2001),
        "a text in it has 2,001 characters; 2,000 are the limit",
    ),
    "a text for the terminal": (
        put("numbers", "more", value="\x1b[31mred"),
        "a text in it cannot be printed: '\\x1b[31mred'",
    ),
    "half a character": (
        put("numbers", "more", value="\ud800"),
        "a text in it cannot be printed: '\\ud800'",
    ),
    "a number without an end": (
        put("numbers", "KiB", 0, value=10**400),
        "a number in it is larger than 2**63",
    ),
    "no numbers": (put("numbers", value={"KiB": [], "seconds": {}}), "it has no numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_record_is_refused_with_its_value(name: str) -> None:
    change, words = REFUSED[name]
    record = made()
    change(record)
    assert sentence(record) == words


IMPLAUSIBLE = {
    "02_batch_size": [
        (("width",), 8, "width: 8 is not plausible (64 to 64 is)"),
        (("samples per second", 0), -1, "batch 4, samples/s: -1 is not plausible (0.001 to "
         "1e+07 is)"),
    ],
    "02_memory_by_kind": [
        (("4", "held", "peak"), 2**35, "batch 4, held, peak, bytes: 3.43597e+10 is not plausible "
         "(0 to 1.71799e+10 is)"),
    ],
    "03_data_parallel_memory": [
        (("torch.cuda.max_memory_allocated",), [1, 2], "it is of 1 GPUs, and has the memory of 2"),
        (("live bytes", "device 0", "parameters"), -1, "device 0, parameters, bytes: -1 is not plausible "
         "(0 to 1.71799e+10 is)"),
    ],
    "09_backend_table": [
        (("gloo GPU tensors", "send"), ["great", ""],
         "gloo GPU tensors, send: 'great' is none of crashes, not here, refuses, works, wrong"),
    ],
    "15_mixed_precision": [
        (("float16", "y", 1), 1e9, "float16, batch 96, samples/s: 1e+09 is not plausible ("
         "0.001 to 1e+07 is)"),
        (("bfloat16",), {"x": [], "y": []}, "lines: 3 is not plausible (2 to 2 is)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", IMPLAUSIBLE)
def test_each_figure_refuses_what_is_not_plausible(name: str) -> None:
    for path, value, words in IMPLAUSIBLE[name]:
        record = made(name)
        put("numbers", *path, value=value)(record)
        assert sentence(record, name) == words


def test_what_is_no_json_or_no_picture_is_refused() -> None:
    text = json.dumps(made()).encode()
    assert sentence(text[:50]).startswith("01_transfer_bandwidth.json is no JSON, or is damaged: ")
    assert sentence(b"\x80\x04N.").startswith("01_transfer_bandwidth.json is no JSON, or is damaged: ")
    assert sentence(b"[" * 200_000).startswith("01_transfer_bandwidth.json is no JSON, or is damaged: ")
    assert sentence(b"[]") == "01_transfer_bandwidth.json has a list where a record is a dict"
    assert sentence(made(), picture=b"GIF89a") == (
        "its picture is no PNG, or is cut off: it begins with b'GIF89a'"
    )
    assert sentence(made(), picture=PICTURE[:-5]).startswith("its picture is no PNG, or is cut off")
    more = PICTURE[:-12] + b"\0\0\0\x04moreMORE\0\0\0\0" + PICTURE[-12:]
    broken = PICTURE[:-20] + b"x" + PICTURE[-19:]
    for picture in (more, broken):
        assert sentence(made(picture=picture), picture=picture) == (
            "its picture is damaged, or has more in it than a picture"
        )
    assert sentence(made(), picture=png(50_000)) == (
        "its picture has 50,000 × 600 pixels; from 100 to 4,000 are allowed"
    )
    assert sentence(made(), name="99_other") == "no lesson has a figure '99_other'"
    for kind in ("json", "png"):
        files: dict[str, Any] = {"json": text, "png": PICTURE}
        del files[kind]
        with pytest.raises(Refused, match=f"^there is no 01_transfer_bandwidth.{kind}$"):
            checked("01_transfer_bandwidth", files)


# --- the archive ------------------------------------------------------------------------------------------

FOLDER = "parts/figure/01_transfer_bandwidth/01_transfer_bandwidth"


def archived(path: Path, names: dict[str, bytes] | list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in names.items() if isinstance(names, dict) else names:
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "../../evil.json": "the name '../../evil.json' leads out of the folder",
        "/etc/evil": "the name '/etc/evil' leads out of the folder",
        "..\\evil.json": r"the name '..\\evil.json' leads out of the folder",
        "C:/evil.json": "the name 'C:/evil.json' leads out of the folder",
        "parts/figure/../x/x.json": "the name 'parts/figure/../x/x.json' leads out of the folder",
    }.items(),
)
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(Refused) as refusal:
        files_in(archived(tmp_path / "gpu.zip", {name: b"{}"}))
    assert str(refusal.value) == words


def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = archived(tmp_path / "gpu.zip", [(f"{FOLDER}.json", b"{}"), (f"{FOLDER}.json", b"[]")])
    with pytest.raises(Refused, match=f"^'{FOLDER}.json' is in it 2 times$"):
        files_in(path)


def test_sizes_have_limits_before_anything_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = archived(
        tmp_path / "gpu.zip", {f"{FOLDER}.json": b" " * 50 * records.MIB, f"{FOLDER}.png": PICTURE}
    )
    found = files_in(bomb)["01_transfer_bandwidth"]
    with pytest.raises(Refused, match=r"^01_\w+.json has 52,428,800 bytes; 1,048,576 are the limit$"):
        checked("01_transfer_bandwidth", found)

    monkeypatch.setattr(records, "MOST_FILES", 1)
    with pytest.raises(Refused, match=r"^it has 2 files; 1 are the limit$"):
        files_in(bomb)
    monkeypatch.setitem(records.MOST_BYTES, "zip", 100)
    with pytest.raises(Refused, match=r"^it has [\d,]+ bytes; 100 are the limit$"):
        files_in(bomb)


def test_a_directory_of_many_entries_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archived(tmp_path / "gpu.zip", {"a": b""})
    content = path.read_bytes()
    entry = content[content.index(records.ENTRY) : content.index(b"PK\5\6")]
    path.write_bytes(content.replace(entry, entry * 1_000_000))
    monkeypatch.setattr(records.zipfile, "ZipFile", pytest.fail)
    with pytest.raises(Refused, match=r"^it has 1,000,000 files; 5,000 are the limit$"):
        files_in(path)


def test_a_size_that_is_not_true_is_not_believed(tmp_path: Path) -> None:
    path = archived(tmp_path / "gpu.zip", {f"{FOLDER}.json": b" " * 50 * records.MIB})
    size = (50 * records.MIB).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(size, (100).to_bytes(4, "little")))
    found = files_in(path)["01_transfer_bandwidth"]["json"]
    assert isinstance(found, Refused) or len(found) <= 100


def test_what_cannot_be_read_is_refused_alone(tmp_path: Path) -> None:
    path = archived(tmp_path / "gpu.zip", {f"{FOLDER}.json": json.dumps(made()).encode(), "summary.md": b"x"})
    content = bytearray(path.read_bytes())
    content[len(FOLDER) + 40] ^= 0xFF
    path.write_bytes(content)
    refusal = files_in(path)["01_transfer_bandwidth"]["json"]
    assert str(refusal).startswith("01_transfer_bandwidth.json cannot be read: ")


@pytest.mark.parametrize("way", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_cannot_be_unpacked_a_little_is_not_unpacked(tmp_path: Path, way: int) -> None:
    with zipfile.ZipFile(tmp_path / "gpu.zip", "w", way) as archive:
        archive.writestr(f"{FOLDER}.json", b" " * 1000)
    refusal = files_in(tmp_path / "gpu.zip")["01_transfer_bandwidth"]["json"]
    assert str(refusal) == "01_transfer_bandwidth.json is packed in a way whose size cannot be limited"


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.zip"
    for prepare in (lambda: None, lambda: path.write_bytes(b"PK\x03\x04 and no more")):
        prepare()
        with pytest.raises(Refused, match=r"^it cannot be read, cut off perhaps: "):
            files_in(path)


# --- record() ---------------------------------------------------------------------------------------------

RECORDS = """
import sys, time
from pathlib import Path

print("with", sys.argv[1:], flush=True)
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
try:
    if "long" in sys.argv:
        time.sleep(600)
except KeyboardInterrupt:
    print("ended early", flush=True)
if "nothing" not in sys.argv:
    (out / "gpu.zip").write_text("recorded")
"""
HANDLES = "import signal\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`scripts.record` in a clone whose .ci/gpu.py is an imitation."""
    course = tmp_path / "course"
    (course / ".ci").mkdir(parents=True)
    (course / ".ci" / "gpu.py").write_text(HANDLES + RECORDS)
    monkeypatch.syspath_prepend(ROOT / "lessons")
    module = importlib.import_module("scripts.record")
    assert module.COURSE == ROOT
    monkeypatch.setattr(module, "COURSE", course)
    monkeypatch.setattr(module, "PANES", [tmp_path / "pane"])
    return module


def test_record_returns_where_gpu_zip_is(module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = module.record("figure", minutes=9)
    assert path == module.COURSE / ".gpu" / "out" / "gpu.zip"
    assert path.read_text() == "recorded"
    said = capsys.readouterr().out
    assert said == f"with {['--here', '--minutes', '9', '--out', str(path.parent), 'figure']}\n"


def test_record_puts_it_where_the_hosts_file_pane_shows_it(module: Any) -> None:
    module.PANES[0].mkdir()
    assert module.record() == module.PANES[0] / "gpu" / "gpu.zip"


def test_record_says_so_where_nothing_was_recorded(module: Any) -> None:
    module.record()
    with pytest.raises(FileNotFoundError, match=r"nothing was recorded in .*: the lines above say why"):
        module.record("nothing")  # an older gpu.zip does not count


def test_a_stop_ends_record_with_what_there_is(module: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        wait_for(lambda: "with" in "".join(said), what="its first line")
        os.kill(os.getpid(), signal.SIGINT)

    said: list[str] = []
    module.print = lambda *words, **_: said.extend(words)
    try:
        thread = threading.Thread(target=stop)
        thread.start()
        assert module.record("long").read_text() == "recorded"
        thread.join()
    finally:
        del module.print
    assert said[-1] == "ended early\n"


def test_the_readmes_cells_name_what_is_there(module: Any) -> None:
    """Near the top of the page: the first cell, and the one that records."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("## On Kaggle or Colab") < text.index("## Start")
    section = text.split("## On Kaggle or Colab")[1].split("\n## ")[0]
    first, last = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    assert set(re.findall(r"course\[(\w+)\]", first)) <= records.PROJECT["optional-dependencies"].keys()
    command = (ROOT / ".ci" / "gpu.py").read_text(encoding="utf-8")
    for package in last.splitlines()[0].removeprefix("%pip install -q ").split():
        assert f'"{package}"' in command, "it is among the wheels that the parts need"
    names: dict[str, Any] = {}
    exec("\n".join(last.splitlines()[1:]), names)
    assert (module.COURSE / ".gpu" / "out" / "gpu.zip").exists()
    (words,) = re.findall(r"record\(\"(--\w+)\"\)", last)
    assert f'"{words}"' in command
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "## A record of your GPU" in page
    assert "(README.md#on-kaggle-or-colab)" in page
    assert "(CONTRIBUTING.md#a-record-of-your-gpu)" in section


def test_record_runs_make_gpus_own_command(tmp_path: Path) -> None:
    """The real one, without a GPU: a rehearsal in a copy of the course, of its first part."""
    course = tmp_path / "course"
    for name in (".ci", "course_lib", "lessons/scripts", "tests/gpu"):
        shutil.copytree(ROOT / name, course / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, course)
    code = "from scripts.record import record; print(record('doctor', minutes=5))"
    environment = {**os.environ, "PYTHONPATH": str(course)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=course / "lessons",
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "doctor: done" in run.stdout
    path = Path(run.stdout.splitlines()[-1])
    assert zipfile.ZipFile(path).testzip() is None
