"""Checkpoints: written whole or not at all, by one rank; every fault of a file caused and told."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib import CheckpointError, load_checkpoint, load_weights, save_checkpoint
from tests.support.cells import quiet_launch
from tests.support.processes import wait_for

RANKS = 3


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.submodule = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)


class Code:
    """Its checkpoint makes a folder when it is loaded without care."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refusal(act: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        act(*args)
    assert "\n" not in str(caught.value), "one sentence"
    return str(caught.value)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model.submodule(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    path = tmp_path / "a.pt"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "who": ("a", [1.5])}

    save_checkpoint(str(path), state)
    again = load_checkpoint(path)

    assert same(again["model"], model.state_dict())
    torch.testing.assert_close(again["optimizer"], optimizer.state_dict(), rtol=0, atol=0)
    assert (again["step"], again["who"]) == (3, ("a", [1.5]))
    assert os.listdir(tmp_path) == ["a.pt"], "nothing is left beside it"


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    save_checkpoint(tmp_path / "disk/a.pt", {"step": 1})
    (tmp_path / "latest.pt").symlink_to("disk/a.pt")
    save_checkpoint(tmp_path / "latest.pt", {"step": 2})

    assert (tmp_path / "latest.pt").is_symlink()
    assert load_checkpoint(tmp_path / "disk/a.pt") == {"step": 2}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([1, 2], r"a checkpoint is a dict, .*; got \[1, 2\]"),
        (nn.Linear(1, 1), r"a checkpoint is a dict, .*; got Linear"),
        ({"f": lambda: None}, "this state cannot be saved"),
        ({"a": Code(Path("x")), "model": nn.Linear(1, 1)}, r"holds posix\.mkdir, torch\..*\.Linear, which"),
    ],
    ids=["list", "model", "lambda", "code in it"],
)
def test_a_state_that_is_none_is_refused_and_the_old_file_stays(
    state: Any, words: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "a.pt", {"step": 1})
    try:
        (tmp_path / "b.pt").read_bytes()
    except FileNotFoundError:  # which has nothing to do with it
        with pytest.raises(TypeError, match=words):
            save_checkpoint(tmp_path / "a.pt", state)
    assert load_checkpoint(tmp_path / "a.pt") == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_no_folder_and_a_folder_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "no/a.pt"
    words = f"the checkpoint {path} cannot be written: No such file or directory"
    assert refusal(save_checkpoint, path, {}) == words
    words = f"the checkpoint {tmp_path} cannot be written: Is a directory"
    assert refusal(save_checkpoint, tmp_path, {}) == words
    (tmp_path / "file").touch()
    assert "Not a directory" in refusal(save_checkpoint, tmp_path / "file/a.pt", {})


def test_a_disk_that_is_full_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """By the limit on a file's size, for which nobody needs a disk."""
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        said = refusal(save_checkpoint, path, {"step": 2, "weights": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written: File too large; the previous file is unchanged" in said
    assert load_checkpoint(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


WRITER = """
import sys, torch
from course_lib import save_checkpoint

while True:
    save_checkpoint(sys.argv[1], {"weights": torch.full((20_000_000,), 8.0), "number": 8.0})
"""


def test_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """With a part of the file written; the next writer removes what was left."""
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"weights": torch.full((1000,), 7.0), "number": 7.0})

    def half_written() -> bool:
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            return any(part.stat().st_size > 100_000 for part in tmp_path.glob("*.part"))
        return False

    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        wait_for(half_written, what="a part")
    finally:
        process.kill()
        process.wait()
    found = load_checkpoint(path)
    assert set(found["weights"].tolist()) == {found["number"]}, "the old one, or the new one, whole"
    save_checkpoint(path, {"number": 9.0})
    assert os.listdir(tmp_path) == ["a.pt"], "what the killed ones left is gone"


def save_on_ranks(path: Path) -> tuple[int, list[str]]:
    dist.init_process_group("gloo")
    save_checkpoint(path, {"rank": dist.get_rank(), "weights": torch.zeros(1_000_000)})
    found = load_checkpoint(path)["rank"]  # it is there as soon as the call returns
    said = []
    for other, state in ((path.parent / "no/a.pt", {}), (path, {"f": lambda: None})):
        with pytest.raises((CheckpointError, TypeError)) as caught:
            save_checkpoint(other, state)
        said.append(str(caught.value))
    return found, said


def test_rank_0_writes_and_the_others_wait_and_hear_when_it_fails(tmp_path: Path) -> None:
    run = quiet_launch(save_on_ranks, tmp_path / "a.pt", nprocs=RANKS, device="cpu", timeout=300)
    for found, (no_folder, no_state) in run.results:
        assert found == 0
        assert no_folder.endswith("no/a.pt cannot be written: No such file or directory")
        assert no_state.startswith("this state cannot be saved")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "good.pt", {"model": Net(50).state_dict()})
    return tmp_path / "good.pt"


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: None, r"there is no checkpoint 'a\.pt' in /"),
        (lambda path: path.mkdir(), ".*Is a directory"),
        (lambda path: path.touch(), r"PATH is empty: its writer was stopped before the first byte$"),
        (lambda path: path.write_bytes(b"PK"), "PATH "),
        (
            lambda path: path.write_bytes(b"step,loss 1,2.5 and more"),
            "PATH is no checkpoint of PyTorch: it begins with b'step,loss 1,2.5 '$",
        ),
        (lambda path: torch.save(torch.zeros(3), path), ".*holds a Tensor, and a checkpoint is a dict$"),
        (
            lambda path: torch.save(nn.Sequential(nn.Linear(1, 1)), path),
            r".*it carries code, .*torch\.nn\.modules\.linear\.Linear",
        ),
    ],
)
def test_what_is_no_checkpoint_is_told(write: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write(path)
    assert re.match(words.replace("PATH", re.escape(str(path))), refusal(load_checkpoint, path))


@pytest.mark.parametrize("keep", [30, 0.99])
def test_a_file_cut_short(keep: float, good: Path) -> None:
    data = good.read_bytes()
    data = data[: keep if keep >= 1 else int(len(data) * keep)]
    good.write_bytes(data)
    said = refusal(load_checkpoint, good)
    assert said.startswith(f"{good} is cut short: its {len(data):,} bytes have no end")


def test_one_wrong_byte_anywhere_is_an_error_and_never_another_weight(good: Path) -> None:
    data, right = good.read_bytes(), load_checkpoint(good)["model"]
    noticed = 0
    for at in range(0, len(data), 97):
        broken = bytearray(data)
        broken[at] ^= 0xFF
        good.write_bytes(broken)
        try:
            found = load_checkpoint(good)["model"]
        except CheckpointError:
            noticed += 1
        else:  # a byte that means nothing: padding, a date
            assert same(found, right), at
    assert noticed > len(data) / 97 / 3


def test_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    path = tmp_path / "gift.pt"
    torch.save({"model": Net().state_dict(), "x": Code(tmp_path / "it ran")}, path)
    said = refusal(load_checkpoint, path)
    assert said.startswith(f"{path} is refused: it carries code, posix.mkdir.")
    assert not (tmp_path / "it ran").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "it ran").exists(), "it would have"


def save_as_from_a_gpu(path: Path) -> None:
    torch.serialization.register_package(0, lambda storage: "cuda:63", lambda storage, label: None)
    torch.save({"weights": torch.arange(3.0)}, path)


def test_a_file_of_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    quiet_launch(save_as_from_a_gpu, path, nprocs=1, device="cpu")
    assert load_checkpoint(path)["weights"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("there", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("here", [False, True], ids=["plain", "wrapped"])
def test_the_prefix_may_be_on_either_side(there: str, here: bool) -> None:
    saved, model = Net(), Net()
    load_weights(
        nn.DataParallel(model) if here else model, {there + k: v for k, v in saved.state_dict().items()}
    )
    assert same(model.state_dict(), saved.state_dict())


def test_a_layer_of_the_name_module_keeps_it() -> None:
    def build() -> nn.ModuleDict:
        return nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})

    saved, model = build(), build()
    for prefix in ("", "module."):
        load_weights(model, {prefix + k: v for k, v in saved.state_dict().items()})
        assert same(model.state_dict(), saved.state_dict())
    alone, other = (nn.ModuleDict({"module": nn.Linear(2, 2)}) for _ in range(2))
    load_weights(alone, nn.DataParallel(other).state_dict())
    assert same(alone.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("lacks", "has", "words"),
    [
        ("norm.bias", {"norm.beta": torch.zeros(3)}, "missing: norm.bias; unexpected: norm.beta"),
        ("", {"norm.bias": torch.zeros(5)}, "another shape: norm.bias is 5 in the checkpoint and 3 here"),
        ("", {"norm.bias": 3}, "another shape: norm.bias is no tensor in the checkpoint and 3 here"),
        (
            "",
            {"norm.num_batches_tracked": torch.zeros(2)},
            "norm.num_batches_tracked is 2 in the checkpoint and one number here",
        ),
        (".", {}, "missing: submodule.weight, submodule.bias, norm.weight, norm.bias and 3 more"),
    ],
)
def test_weights_that_do_not_fit_leave_the_model_as_it_was(lacks: str, has: Any, words: str) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = {name: value for name, value in Net().state_dict().items() if not lacks or lacks not in name}
    assert words in refusal(load_weights, model, weights | has)
    assert same(model.state_dict(), before)
