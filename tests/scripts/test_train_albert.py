"""lessons/scripts/train_albert.py: alone, resumed, on two ranks as on one, and without transformers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from course_lib import torchrun
from tests.support.lesson_programs import changed, load

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "lessons" / "scripts" / "train_albert.py"
SMALL = ["--batch-size", "16", "--epochs", "2"]
FEW = 150  # paragraphs


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return load("train_albert")


Train = Callable[..., "int | str | None"]


@pytest.fixture
def train(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """The program in this process, as a group of one, on a part of its text; how it ended."""
    whole = program.paragraphs()
    monkeypatch.setattr(program, "paragraphs", lambda: whole[:FEW])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    torch.set_num_threads(1)

    def run(*words: object) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["train_albert.py", *map(str, words)])
        try:
            program.train(program.parse_arguments())
        except SystemExit as ended:
            dist.destroy_process_group()
            return ended.code
        return 0

    yield run
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("albert") / "pretrained"


def state(folder: Path) -> dict[str, object]:
    return torch.load(folder / "training.pt", weights_only=True)


# --- in this process: importing transformers takes seconds ------------------------------------------------


def test_ended_in_an_epoch_it_goes_on(
    program: ModuleType,
    train: Train,
    pretrained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And what it leaves, from_pretrained loads: the model with its loss, and the tokenizer."""
    rates: list[float] = []
    losses: list[float] = []

    def log(loss: torch.Tensor | None = None, lr: float = 0.0, held_out: float = 0.0) -> None:
        if loss is None:
            losses.append(held_out)
            return
        rates.append(lr)
        if len(rates) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(program, "log", log)
    assert train(*SMALL, "--output", pretrained) == 128 + signal.SIGTERM
    assert (state(pretrained)["step"], losses) == (3, [])
    assert train(*SMALL, "--output", pretrained) == 0
    output = capsys.readouterr().out
    steps = state(pretrained)["step"]
    assert output.startswith(f"3 of {steps} steps were done already\nepoch 1: loss ")
    assert re.search(r"^epoch 2: loss .*, held-out loss .*, [\d,]+ tokens/s on 1 rank$", output, re.MULTILINE)
    assert output.count("[MASK]") == 1, "a sentence is filled in"
    assert output.splitlines()[-1].count("%") == 5
    assert len(rates) == steps, "no step twice, none left out"
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True), "one warm-up, over both starts"
    assert max(rates) == pytest.approx(3e-3)
    assert losses[1] < losses[0] < 6.9

    tokenizer = program.AlbertTokenizer.from_pretrained(pretrained)
    model = program.AlbertForMaskedLM.from_pretrained(pretrained)
    for (name, kept), now in zip(
        state(pretrained)["model"].items(), model.state_dict().values(), strict=True
    ):
        assert torch.equal(kept, now), name
    samples = program.pieces_of(program.paragraphs(), tokenizer, 32)
    hidden = {"mask_replace_prob": 1, "random_replace_prob": 0}
    batch = program.DataCollatorForLanguageModeling(tokenizer, seed=0, **hidden)(samples[::10])
    with torch.no_grad():
        loss = program.sum_of_losses(model, batch) / program.masked(batch)
    assert loss.item() == pytest.approx(losses[-1], abs=0.2), "other masks"

    assert train("--batch-size", 8, "--epochs", 2, "--output", pretrained).startswith(
        f"cannot begin: ValueError: {pretrained} is of another training run, with "
    )


def test_a_restart_changes_nothing(
    program: ModuleType, train: Train, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks are those that would have been drawn, and so the weights those of one go, bit by bit."""
    if not pretrained.exists():
        assert train(*SMALL, "--output", pretrained) == 0
    words = [*SMALL, "--model", pretrained, "--output"]
    assert train(*words, tmp_path / "in one go") == 0
    steps_an_epoch = state(tmp_path / "in one go")["step"] // 2
    logged = 0

    def log(loss: torch.Tensor | None = None, **_: float) -> None:
        nonlocal logged
        logged += loss is not None
        if loss is not None and logged in (3, steps_an_epoch + 2):  # in each of the two epochs
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(program, "log", log)
    for code in (128 + signal.SIGTERM, 128 + signal.SIGTERM, 0):
        assert train(*words, tmp_path / "in pieces") == code
    whole, pieces = (state(tmp_path / name)["model"] for name in ("in one go", "in pieces"))
    assert [name for name in whole if not torch.equal(whole[name], pieces[name])] == []


@pytest.mark.parametrize("name", ["train_albert", "train_ddp", "train_imagenet", "train_resume"])
def test_torchrun_can_show_the_traceback_of_a_rank(name: str) -> None:
    code = (ROOT / "lessons" / "scripts" / f"{name}.py").read_text()
    assert re.findall(r"^@record.*\ndef (\w+)", code, re.MULTILINE) == ["train"]


def test_the_rate_never_turns_negative(program: ModuleType) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule, rates = program.linear(optimizer, 20), []
    for _ in range(25):  # who counts too few steps makes more than that
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert max(rates) == rates[2] == 2
    assert rates[19] > 0
    assert rates[20:] == [0] * 5


def test_what_decays(program: ModuleType) -> None:
    small = program.AlbertConfig(vocab_size=9, embedding_size=4, hidden_size=4, num_attention_heads=1)
    model = program.AlbertForMaskedLM(small)
    optimizer = program.optimizer_of(model, 1e-3)
    decays, spared = ({id(each) for each in group["params"]} for group in optimizer.param_groups)
    for name, each in model.named_parameters():
        assert (id(each) in spared) == (name.endswith("bias") or "orm.weight" in name), name
        assert (id(each) in decays) != (id(each) in spared)


def test_the_albert_that_the_lesson_keeps_knows_its_text(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program goes on from it, and hardly moves it: the loss is that of a model that has learned."""
    folder = ROOT / "lessons" / "recorded" / "16_albert"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}, "nothing that is a pickle"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1e6
    kept = json.loads((folder.parent / "deeper" / "16_from_scratch.json").read_text())["long_training"][
        "returned"
    ]
    assert train("--model", folder, "--epochs", 1, "--lr", 1e-12) == 0
    said = capsys.readouterr().out
    loss = float(re.search(r"held-out loss ([\d.]+)", said)[1])
    assert loss < (kept[0] + kept[-1]) / 2, "of the first paragraphs of this Python's texts"
    assert said.splitlines()[-1].startswith("It can [MASK] used.  ▁be ")
    assert train("--model", folder, "--length", 33) == (
        f"cannot begin: ValueError: --length 33 is more than the 32 tokens that {folder} takes"
    )


# --- two ranks --------------------------------------------------------------------------------------------

# The program on a part of its text, with the same questions wherever it runs
FIXED = """
    def every_fifth(tokenizer, seed=None, **hidden):
        def collate(samples):
            batch = tokenizer.pad(samples, return_tensors="pt")
            ids = batch["input_ids"]
            asked = (ids > 4) & (ids % (5 if seed is None else 4) == 0)
            batch["labels"] = torch.where(asked, ids, -100)
            batch["input_ids"] = torch.where(asked, tokenizer.mask_token_id, ids)
            return batch
        return collate

    program.DataCollatorForLanguageModeling = every_fifth
"""


def test_two_ranks_train_what_one_trains(
    program: ModuleType, train: Train, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sentences in a step, of which each rank has half: their questions are not half and half."""
    if not pretrained.exists():
        assert train(*SMALL, "--output", pretrained) == 0
    lines = (
        f"whole = program.paragraphs()\nprogram.paragraphs = lambda: whole[:{FEW}]\n{textwrap.dedent(FIXED)}"
    )
    script = changed(tmp_path / "two.py", lines, "train_albert")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--epochs", 1, "--lr", 1e-3, "--model", pretrained, "--output"]
    run = torchrun(script, *words, tmp_path / "two", "--batch-size", 8, nproc_per_node=2, dashboard=False)
    assert "on 2 ranks" in run.logs[0]
    assert run.logs[1] == "", "one rank tells"
    assert run.metrics[0]["held_out"].tolist() == run.metrics[1]["held_out"].tolist()
    assert len(run.metrics[0]["loss"]) > 5

    names = {"program": program, "torch": torch}
    monkeypatch.setattr(program, "DataCollatorForLanguageModeling", None)  # put back in the end
    exec(textwrap.dedent(FIXED), names)
    assert train(*words, tmp_path / "one", "--batch-size", 16) == 0
    one, two = (state(tmp_path / name)["model"] for name in ("one", "two"))
    began = state(pretrained)["model"]
    for name in one:
        assert torch.allclose(one[name], two[name], atol=2e-4), name
    moved = [(one[name] - began[name]).abs().max().item() for name in one]
    assert max(moved) > 5e-3, "it has trained"


# --- without transformers ---------------------------------------------------------------------------------


def test_without_transformers_the_program_says_so_and_all_else_does_without_it() -> None:
    """A rank's preload, which is told to load it, goes on."""
    code = (
        "import runpy, sys; sys.modules['transformers'] = None\n"
        "import course_lib.rank.preload; assert 'fractions' in sys.modules\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    environment = os.environ | {"COURSE_PRELOAD": "transformers.data fractions", "COURSE_LEAN": "1"}
    for name in ("COURSE_KERNEL", "RANK"):
        environment.pop(name, None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("train_albert.py needs transformers: `make setup`, or `pip install")
    assert done.stderr.count("\n") == 1

    wanting = re.compile(r"^\s*(?:from|import) transformers\b", re.MULTILINE)
    for path in [*ROOT.glob("course_lib/**/*.py"), *ROOT.glob("lessons/scripts/*.py")]:
        assert path == SCRIPT or not wanting.search(path.read_text()), path
