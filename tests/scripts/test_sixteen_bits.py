"""`--bf16` and `--amp` where a GPU has no bfloat16 in hardware: float16, with a scaled loss.

The GPUs are imitated by what torch says of them, and float16 is computed on the CPU: no T4 has run this.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import PIL.Image
import pytest
import torch

from course_lib import launch
from tests.support.warm import ended

SCRIPTS = Path(__file__).parents[2] / "lessons" / "scripts"
SAID = "a GPU has no bfloat16 in hardware: float16 instead, with a scaled loss"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS.parent)


@pytest.mark.parametrize("in_hardware", [[True, True], [True, False]], ids=str)
def test_all_ranks_take_float16_where_one_has_no_bfloat16(in_hardware: list[bool]) -> None:
    """Its GPU emulates bfloat16, as torch does before Ampere."""
    folder = str(SCRIPTS.parent)

    def work() -> str:
        import torch.distributed as dist

        sys.path.insert(0, folder)
        dist.init_process_group("gloo")
        mine, real = in_hardware[dist.get_rank()], torch.tensor
        supported = mock.Mock(side_effect=lambda including_emulation=True: mine or including_emulation)
        with (
            mock.patch("torch.cuda.is_bf16_supported", supported),
            mock.patch("torch.tensor", lambda value, device: real(value)),  # on the CPU instead
        ):
            program = importlib.import_module("scripts.train_ddp")
            found = program.sixteen_bits(SimpleNamespace(type="cuda"))
        dist.destroy_process_group()
        return str(found)

    run = launch(work, nprocs=2, device="cpu", dashboard=False, timeout=120)
    assert run.results == [f"torch.{'bfloat16' if all(in_hardware) else 'float16'}"] * 2
    assert [log.count(SAID) for log in (run.logs[0], run.logs[1])] == [int(not all(in_hardware)), 0]
    texts = [(SCRIPTS / f"{name}.py").read_text() for name in ("train_ddp", "train_imagenet")]
    ours, theirs = (re.search(r"(?ms)^def sixteen_bits.*?(?=^@)", text)[0] for text in texts)
    assert ours == theirs


def trained(tmp_path: Path, program: str, kind: str, *words: object) -> tuple[str, float]:
    """What a program prints that computes in this type, in one process, and the scale at the end."""
    script = tmp_path / f"{kind}.py"
    script.write_text(f"""
import sys
sys.path[:0] = [{str(SCRIPTS)!r}, {str(SCRIPTS.parents[1])!r}]
import torch, {program} as program

class Noted(torch.amp.GradScaler):
    def update(self):
        super().update()
        Noted.last = self

torch.amp.GradScaler, program.sixteen_bits = Noted, lambda device: torch.{kind}
program.train(program.parse_arguments())
print("scale", Noted.last.get_scale())
""")
    code, output, errors = ended(script, *words)
    assert code == 0, errors
    *_, line, scale = output.splitlines()
    return line, float(scale.split()[1])


@pytest.mark.usefixtures("digits_are_there")
def test_train_ddp_learns_in_float16_and_clips_what_is_unscaled(tmp_path: Path) -> None:
    words = ("--width", 2, "--batch-size", 100, "--epochs", 1, "--clip", 1.0, "--bf16")
    accuracies = []
    for kind in ("bfloat16", "float16"):
        line, scale = trained(tmp_path, "train_ddp", kind, *words)
        assert (scale > 1) == (kind == "float16")
        accuracies.append(float(re.search(r"held-out accuracy ([\d.]+)%", line)[1]))
    assert accuracies[0] > 80
    assert accuracies[1] == pytest.approx(accuracies[0], abs=3)


def test_train_imagenet_trains_in_float16(tmp_path: Path) -> None:
    for split, count in {"train": 8, "val": 2}.items():
        for name, color in {"n01": (200, 20, 20), "n02": (20, 200, 20)}.items():
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for i in range(count):
                path = tmp_path / "data" / split / name / f"{i}.JPEG"
                PIL.Image.new("RGB", (48, 40), tuple(value + 3 * i for value in color)).save(path)
    words = ("--data", tmp_path / "data", "--arch", "resnet8", "--size", 16, "--batch-size", 4, "--amp")
    words = (*words, "--checkpoint", path := tmp_path / "checkpoint.pt")
    line, scale = trained(tmp_path, "train_imagenet", "float16", *words, "--epochs", 1)
    assert scale > 1
    assert float(re.search(r"loss ([\d.]+)", line)[1]) < 1, "of two classes"
    state = torch.load(path, weights_only=True)
    state["scaler"]["scale"] = 8.0
    torch.save(state, path)
    assert trained(tmp_path, "train_imagenet", "float16", *words, "--epochs", 2)[1] == 8, "as it was saved"
    assert trained(tmp_path, "train_imagenet", "bfloat16", *words, "--epochs", 3)[1] == 1
    assert trained(tmp_path, "train_imagenet", "float16", *words, "--epochs", 4)[1] > 1, "a new one"
