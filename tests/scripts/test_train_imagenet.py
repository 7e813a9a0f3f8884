"""lessons/scripts/train_imagenet.py, as a learner starts it; on few small pictures, and few processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType

import PIL.Image
import pytest
import torch
from torchvision.models import get_model

from tests.support.lesson_programs import SCRIPTS, SECONDS, changed, load
from tests.support.processes import processes_marked, wait_for
from tests.support.warm import ended

SCRIPT = SCRIPTS / "train_imagenet.py"
SMALL = ["--arch", "resnet8", "--size", "16", "--batch-size", "4", "--lr", "0.2"]
LINE = r"epoch {}: loss \d\.\d{{3}}, top-1 (\d+\.\d)%, top-5 (\d+\.\d)%; [\d,]+ pictures/s, "
LINE += r"\d+% to \d+% waiting, by rank"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[2]))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes, by colour; 26 pictures to train on, 7 held out. Their names end as ImageNet's do."""
    colors = {"n01": (200, 20, 20), "n02": (20, 200, 20), "n03": (20, 20, 200)}
    for split, counts in (("train", (9, 9, 8)), ("val", (3, 2, 2))):
        for (name, color), count in zip(colors.items(), counts, strict=True):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for i in range(count):
                bright = tuple(value + 3 * i for value in color)
                image = PIL.Image.new("RGB", (48, 40), bright)
                image.save(tmp_path / "data" / split / name / f"{name}_{i}.JPEG", "JPEG")
    return tmp_path / "data"


@pytest.fixture
def program() -> ModuleType:
    return load("train_imagenet")


def state(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def without_statistics(state: dict) -> tuple[dict, dict[str, torch.Tensor]]:
    """A checkpoint without batch norm's running statistics, and these."""
    found = {name: state["model"].pop(name) for name in list(state["model"]) if ".running_" in name}
    return state, found


def test_two_ranks_stopped_in_an_epoch_and_resumed_are_one_run(tmp_path: Path, folder: Path) -> None:
    """To the last digit, though the one had a worker for each rank, and the others none or two.

    Of batch norm's statistics, of which each rank keeps its own, a checkpoint has the mean: to rounding.
    """
    words = [*SMALL, "--data", folder, "--epochs", 3, "--batch-size", 2, "--checkpoint"]
    code, output, errors = ended(SCRIPT, *words, tmp_path / "whole.pt", "--workers", 1, ranks=2)
    assert code == 0, errors
    found = [re.fullmatch(LINE.format(1 + i), line) for i, line in enumerate(output.splitlines())]
    assert len(found) == 3
    assert all(found), output
    for line in found:
        hits = float(line[1]) / 100 * 7
        assert abs(hits - round(hits)) < 0.01, "of seven pictures, each evaluated once"
        assert line[2] == "100.0", "three classes, five guesses"

    # 13 pictures on each rank make 6 steps an epoch; rank 1 alone is asked, in the second epoch
    asked = changed(
        tmp_path / "asked.py",
        """
        steps = 0

        def log(loss=None, **others):
            global steps
            steps += loss is not None
            if steps == 6 + 3 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)

        program.log = log
        """,
        "train_imagenet",
    )
    code, output, errors = ended(asked, *words, tmp_path / "parts.pt", ranks=2)
    assert code == 1
    assert output.count("epoch") == 1, output
    assert (state(tmp_path / "parts.pt")["epoch"], state(tmp_path / "parts.pt")["seen"]) == (1, 5 * 2 * 2)
    code, output, errors = ended(SCRIPT, *words, tmp_path / "parts.pt", "--workers", 2, ranks=2)
    assert code == 0, errors
    assert output.startswith("done already: 1 epochs, and 20 pictures of the next\nepoch 2: ")
    whole, parts = (state(tmp_path / name) for name in ("whole.pt", "parts.pt"))
    (whole, one), (parts, other) = map(without_statistics, (whole, parts))
    assert whole.pop("of") == parts.pop("of") == {"arch": "resnet8", "classes": 3}
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)
    assert len(one) > 0
    for name, statistics in one.items():
        torch.testing.assert_close(other[name], statistics, rtol=1e-5, atol=1e-6)
    assert not [each for each in os.listdir(tmp_path) if each.endswith(".part")]


def test_two_ranks_are_one_of_the_whole_batch(tmp_path: Path, folder: Path) -> None:
    """Where no layer mixes the samples of a batch, and each has the same crop: in float64, to rounding."""
    script = changed(
        tmp_path / "plain.py",
        """
        from torch import nn

        def resnet8(num_classes):
            layers = [nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Tanh(), nn.Linear(8, num_classes)]
            return nn.Sequential(*layers).double()

        program.resnet8 = resnet8
        standard = program.standard
        program.standard = lambda images: standard(images).double()
        """,
        "train_imagenet",
    )
    words = [*SMALL, "--data", folder, "--epochs", 2, "--shrink", "--checkpoint"]
    assert ended(script, *words, tmp_path / "one.pt", "--batch-size", 4)[0] == 0
    assert ended(script, *words, tmp_path / "two.pt", "--batch-size", 2, ranks=2)[0] == 0
    one, two = (state(tmp_path / name)["model"] for name in ("one.pt", "two.pt"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["train_imagenet", "train_ddp"])
def test_no_worker_is_forked_after_a_collective(name: str, tmp_path: Path, folder: Path) -> None:
    """In Python 3.11 one in some 400 hung: gloo's thread held a lock of the interpreter's at that moment."""
    script = changed(
        tmp_path / "told.py",
        """
        import multiprocessing.process
        from torch.utils.data import TensorDataset

        made = []
        few = TensorDataset(torch.rand(100, 1, 28, 28), torch.zeros(100, dtype=torch.int64))
        program.digits = lambda train=True: few

        def noted(what, real):
            def call(*args, **named):
                made.append(what)
                return real(*args, **named)

            return call

        process = multiprocessing.process.BaseProcess
        process.start = noted("worker", process.start)
        program.DDP = noted("DDP", program.DDP)
        for name in ("all_reduce", "broadcast", "broadcast_object_list", "barrier"):
            setattr(program.dist, name, noted(name, getattr(program.dist, name)))
        program.dist.destroy_process_group = lambda *_: print("made:", *made)
        """,
        name,
    )
    words = [*SMALL, "--data", folder] if name == "train_imagenet" else ["--width", 2, "--batch-size", 50]
    code, output, errors = ended(script, *words, "--epochs", 2, "--workers", 1)
    assert code == 0, errors
    made = output.splitlines()[-1].split()
    assert made[:3] == ["made:", "worker", "DDP"]
    assert made.count("worker") == 1, "the same worker makes the held-out batches"


def test_each_rank_keeps_its_own_running_statistics_until_they_are_averaged(
    tmp_path: Path, folder: Path
) -> None:
    """No broadcast in forward; what is evaluated and saved is the mean of the ranks'."""
    script = changed(
        tmp_path / "told.py",
        """
        made, average, means = program.resnet8, program.average_statistics, []

        def resnet8(num_classes):
            model = made(num_classes)
            model.bn1.register_forward_hook(lambda bn, inputs, _: means.append(inputs[0].mean((0, 2, 3))))
            return model

        def told(model):
            own, found = torch.zeros(64), [None, None]
            for mean in means:
                own = 0.9 * own + 0.1 * mean.detach()
            kept = torch.allclose(model.bn1.running_mean, own, atol=1e-6)
            program.dist.all_gather_object(found, own)
            average(model)
            mean = torch.allclose(model.bn1.running_mean, sum(found) / 2, atol=1e-6)
            if os.environ["RANK"] == "1":
                print(len(means), "steps:", kept, mean)

        program.resnet8, program.average_statistics = resnet8, told
        """,
        "train_imagenet",
    )
    code, output, errors = ended(script, *SMALL, "--data", folder, "--epochs", 1, ranks=2)
    assert code == 0, errors
    assert "3 steps: True True" in output.splitlines()


def test_the_list_of_pictures_is_shared(program: ModuleType, folder: Path) -> None:
    """Its 100,000 entries would be 300,000 objects, and each worker would end up with all of them."""
    (folder / "train" / "n01").rename(folder / "train" / "n0é")  # a folder of more bytes than characters
    data, plain = program.Packed(folder / "train"), program.ImageFolder(folder / "train")
    assert len(data) == 26
    for i in range(26):
        (one, label), (other, same_label) = data[i], plain[i]
        assert (one.tobytes(), label) == (other.tobytes(), same_label)
    many = program.Samples(plain.samples * 4000)
    assert many[26 * 3999] == plain.samples[0]
    assert len(ForkingPickler.dumps(vars(many))) < 2000, "what a worker gets that is not forked"
    assert not [name for name, value in vars(data).items() if isinstance(value, list) and len(value) == 26]


def test_a_crop_seeds_no_gpu(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would: dropout on a GPU would draw one mask again and again."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)

    class Drawn:
        def __getitem__(self, i: int) -> float:
            return torch.rand(()).item()

    pictures = program.Pictures(Drawn(), ["held out"], seed=1)
    torch.manual_seed(5)
    assert seeded == [5]
    drawn = [pictures[3, 0], pictures[3, 1], pictures[4, 0]]
    assert len(set(drawn)) == 3
    assert pictures[3, 1] == drawn[1]
    assert pictures[0] == "held out"
    assert seeded == [5]
    after = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(())), "the rank's own generator goes on as before"


def test_auxiliary_classifiers_are_trained(program: ModuleType) -> None:
    """Each parameter has a gradient: DDP would not go on without one."""
    model = get_model("googlenet", num_classes=3, init_weights=False)
    images, labels = torch.rand(2, 3, 64, 64), torch.tensor([0, 2])
    scores = model(images)
    assert len(scores) == 3
    program.loss_of(scores, labels).backward()
    assert not [name for name, each in model.named_parameters() if each.grad is None]
    plain = program.F.cross_entropy(scores[0], labels, label_smoothing=0.1)
    assert torch.equal(program.loss_of(scores[0], labels), plain)


def test_alone_without_the_course_and_a_kill_leaves_no_worker(tmp_path: Path, folder: Path) -> None:
    """A copy of the file in a place where no course_lib is; with a network of torchvision, in bfloat16."""
    shutil.copy(SCRIPT, tmp_path / "mine.py")
    script = tmp_path / "without.py"
    script.write_text(
        "import runpy, sys; sys.modules['course_lib'] = None\n"
        f"runpy.run_path({str(tmp_path / 'mine.py')!r}, run_name='__main__')"
    )
    words = [script, "--arch", "resnet18", "--amp", "--size", 32, "--batch-size", 4]
    code, output, errors = ended(*words, "--data", folder, "--epochs", 1)
    assert (code, errors) == (0, "")
    assert re.fullmatch(LINE.format(1), output.strip()), output

    mark = "TEST_MARK", str(tmp_path)
    command = [sys.executable, str(SCRIPT), *SMALL, "--data", str(folder), "--epochs", "500"]
    command += ["--workers", "1", "--checkpoint", str(tmp_path / "a.pt")]
    environment = os.environ | dict([mark])
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for((tmp_path / "a.pt").exists, seconds=SECONDS)
    for each in processes_marked(*mark):  # as torchrun does it, and a cluster: to all of them
        each.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 128 + signal.SIGTERM, errors
    wait_for(lambda: not processes_marked(*mark))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size", "1"], "argument --batch-size: it is a number from 2 on, not 1"),
        (["--data", "."], "argument --data: '.' must have train and val, with a folder a class"),
    ],
    ids=["batch", "data"],
)
def test_a_wrong_argument_is_told(
    words: list[str],
    said: str,
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_imagenet.py", *words])
    with pytest.raises(SystemExit, match="2"):
        program.parse_arguments()
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_other_held_out_classes_are_told_in_a_line(folder: Path) -> None:
    shutil.rmtree(folder / "val" / "n02")
    code, output, errors = ended(SCRIPT, *SMALL, "--data", folder, "--epochs", 1)
    assert (code, output) == (1, "")
    assert "other classes in val" in errors
