"""course_lib.data and course_lib.home: what is made, and every fault really caused."""

import errno
import hashlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST

from course_lib.data import digits as data
from course_lib.data.digits import TEST_FONTS, TEST_SIZE, TRAIN_FONTS, TRAIN_SIZE, DataError, digits
from course_lib.home import CourseHomeError, home
from tests.support.processes import wait_for

NAMES = [f"{s}-{w}" for s in ("train", "t10k") for w in ("images-idx3-ubyte", "labels-idx1-ubyte")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The digits, made once for this file, and the CPU seconds that it took."""
    root = tmp_path_factory.mktemp("made")
    before = time.process_time()
    digits(root=root)
    return root, time.process_time() - before


@pytest.fixture(autouse=True)
def course_home(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cheap(monkeypatch):
    """The real maker at a hundredth of its size, for tests in which only the files matter."""
    monkeypatch.setattr(data, "TRAIN_SIZE", 180)
    monkeypatch.setattr(data, "TEST_SIZE", 20)


def sums(root: Path) -> dict[str, str]:
    return {n: hashlib.sha256((root / "MNIST" / "raw" / n).read_bytes()).hexdigest() for n in NAMES}


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 400 + text.count("/") * 40
    return text


# What is made


def test_making_takes_under_ten_seconds_of_cpu(made):
    assert made[1] < 10


def test_two_makings_give_the_same_bytes(made, tmp_path):
    digits(root=tmp_path / "again")
    assert sums(tmp_path / "again") == sums(made[0])


def test_making_leaves_torchs_threads_as_they_were(tmp_path, cheap, one_thread):
    torch.set_num_threads(2)
    digits(root=tmp_path)
    assert torch.get_num_threads() == 2


def test_sizes_classes_and_default_transform(made):
    for train, size in ((True, TRAIN_SIZE), (False, TEST_SIZE)):
        dataset = digits(train, root=made[0])
        assert isinstance(dataset, MNIST)
        assert len(dataset) == size
        assert torch.bincount(dataset.targets).tolist() == [size // 10] * 10
        image, label = dataset[0]
        assert image.shape == (1, 28, 28)
        assert image.dtype == torch.float32
        assert isinstance(label, int)


def test_labels_come_in_no_order(made):
    """Each of two ranks' interleaved shards sees every class about equally often."""
    for shard in (digits(root=made[0]).targets[rank::2] for rank in range(2)):
        counts = torch.bincount(shard, minlength=10)
        assert counts.min() > 0.8 * counts.max()


def test_mean_and_std_are_those_of_the_training_digits(made):
    pixels = digits(root=made[0]).data.double() / 255
    assert pixels.mean().item() == pytest.approx(data.MEAN, abs=2e-4)  # a stand-in for a typeface moves them
    assert pixels.std().item() == pytest.approx(data.STD, abs=2e-4)
    assert f"mean {data.MEAN} and standard deviation {data.STD}" in digits.__doc__
    batch = next(iter(DataLoader(digits(root=made[0]), 2000)))[0]
    assert batch.mean().item() == pytest.approx(0, abs=0.05)
    assert batch.std().item() == pytest.approx(1, abs=0.05)


def test_held_out_digits_share_no_picture_with_training(made):
    def pictures(train):
        return {image.numpy().tobytes() for image in digits(train, root=made[0]).data}

    train, test = pictures(True), pictures(False)
    assert len(train) == TRAIN_SIZE  # not one of them twice
    assert len(test) == TEST_SIZE
    assert not train & test


def test_each_set_is_drawn_in_its_own_typefaces(tmp_path, cheap, monkeypatch):
    """With the training typefaces black all over and the test's white, so are the pictures."""
    assert not set(TRAIN_FONTS) & set(TEST_FONTS)
    sheets = {TRAIN_FONTS: torch.zeros, TEST_FONTS: torch.ones}
    monkeypatch.setattr(data, "_glyphs", lambda fonts: sheets[fonts](len(fonts), 3, 10, 64, 64))
    assert digits(True, root=tmp_path).data.max() < 30
    assert digits(False, root=tmp_path).data[:, 14, 14].min() > 150


def test_every_typeface_has_ten_different_digits():
    """A font without digits would show one and the same empty box, or nothing."""
    glyphs = data._glyphs(TRAIN_FONTS + TEST_FONTS)
    for name, font in zip(TRAIN_FONTS + TEST_FONTS, glyphs[:, 0], strict=True):
        assert all(digit.sum() > 50 for digit in font), name
        apart = torch.cdist(font.flatten(1), font.flatten(1)) + 1e9 * torch.eye(10)
        assert apart.min() > 5, name
        assert all(digit[[0, -1]].sum() + digit[:, [0, -1]].sum() == 0 for digit in font), (
            f"{name} is cut off"
        )


def test_a_typeface_that_matplotlib_lacks_changes_no_other_picture(made, tmp_path, monkeypatch):
    """As with matplotlib 3.9 and 3.10, which have no cmti10."""
    fonts = Path(matplotlib.get_data_path(), "fonts", "ttf")
    fewer = tmp_path / "fonts" / "ttf"
    fewer.mkdir(parents=True)
    for font in fonts.glob("*.ttf"):
        if font.stem not in data.STAND_INS:
            (fewer / font.name).symlink_to(font)
    assert set(data.STAND_INS) <= set(TRAIN_FONTS)
    assert {*TRAIN_FONTS, *TEST_FONTS, *data.STAND_INS.values()} - {*data.STAND_INS} <= {
        font.stem for font in fewer.iterdir()
    }
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    digits(root=tmp_path / "root")
    before, after = sums(made[0]), sums(tmp_path / "root")
    assert {name for name in NAMES if before[name] != after[name]} <= {NAMES[0]}
    here, there = (digits(root=root).data for root in (made[0], tmp_path / "root"))
    changed = (here != there).any(2).any(1).double().mean().item()
    whole = all((fonts / f"{name}.ttf").exists() for name in TRAIN_FONTS)
    assert changed == pytest.approx(whole / len(TRAIN_FONTS), abs=0.01)


def test_plain_torchvision_loads_the_files(made):
    for train in (True, False):
        theirs, ours = (
            MNIST(made[0], train=train, download=False),
            digits(train, root=made[0], transform=None),
        )
        assert torch.equal(theirs.data, ours.data)
        assert torch.equal(theirs.targets, ours.targets)
        assert np.array_equal(np.asarray(theirs[5][0]), np.asarray(ours[5][0]))  # both PIL pictures


def test_it_can_be_sent_to_a_worker_process(made):
    """A DataLoader's workers, where they are started afresh, get the dataset pickled."""
    dataset = digits(False, root=made[0])
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[7][0], dataset[7][0])


def test_a_small_cnn_learns_them_and_a_linear_model_less_well(made, one_thread):
    """Two epochs: 97 to 98 % for the CNN, 87 % for the linear model, on the held-out typefaces."""
    from torch import nn

    def tensors(train):
        dataset = digits(train, root=made[0])
        return (dataset.data[:, None] / 255 - data.MEAN) / data.STD, dataset.targets

    (images, labels), (test_images, test_labels) = tensors(True), tensors(False)

    def accuracy(model):
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(2):
            for batch in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            return (model(test_images).argmax(1) == test_labels).float().mean().item()

    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    cnn = accuracy(
        nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    )
    linear = accuracy(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    assert cnn > 0.955
    assert linear < cnn - 0.04


# Where it is kept


def test_default_folder_is_private_and_in_the_course_home(course_home, cheap):
    assert Path(digits().root) == course_home / "data" / "digits-v1"
    for folder in (course_home, *(p for p in course_home.rglob("*") if p.is_dir())):
        assert folder.stat().st_mode & 0o777 == 0o700, folder


def test_made_once(course_home, cheap, monkeypatch):
    digits()
    monkeypatch.setattr(data, "_make", lambda root: pytest.fail("made twice"))
    digits(False)


def test_home_without_the_variable_is_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("COURSE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home().is_relative_to(tmp_path)
    assert home().name == "multi-gpu-course"


def test_home_is_absolute_and_knows_the_tilde(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("here", "~/here"):
        monkeypatch.setenv("COURSE_HOME", value)
        assert home() == tmp_path / "here"


@pytest.mark.parametrize("kind", ["below a file", "a file itself", "in /proc", "nobody's"])
def test_home_that_cannot_be_made(kind, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    folder = {
        "below a file": str(tmp_path / "file" / "home"),
        "a file itself": str(tmp_path / "file"),
        "in /proc": "/proc/no/home",
        "nobody's": "~no-such-user-here/home",
    }[kind]
    monkeypatch.setenv("COURSE_HOME", folder)
    with pytest.raises(CourseHomeError) as caught:
        digits()
    assert folder in one_sentence(caught.value)
    assert "set COURSE_HOME to a folder you can write" in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_home_that_may_not_be_written(tmp_path, monkeypatch):
    """Root may write anywhere, so the system's answer is what is replaced here."""
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == tmp_path and mode & os.W_OK))
    with pytest.raises(CourseHomeError, match="you may not write there"):
        home()


# Bad arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"train": "test"}, "train must be True .* not 'test'"),
        ({"transform": 3}, "transform must be .* not 3"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_made(arguments, words, course_home):
    with pytest.raises(TypeError, match=words):
        digits(**arguments)
    assert not course_home.exists()


# Several makers, killed makers

MAKER = "from course_lib import digits; print(len(digits()) + len(digits(False)))"


EIGHT = f"""
import os, torchvision
from course_lib.data import digits as data
gate, opener = os.pipe()
makers, make = [], data._make
data._make = lambda root: (os.write(1, b"made "), make(root))
for _ in range(8):
    makers.append(os.fork())
    if not makers[-1]:
        os.close(opener)
        os.read(gate, 1)  # all wait here until the parent closes its end
        os._exit(0 if len(data.digits()) + len(data.digits(False)) == {TRAIN_SIZE + TEST_SIZE} else 1)
os.close(opener)
print([os.waitstatus_to_exitcode(os.waitpid(maker, 0)[1]) for maker in makers])
"""


def test_eight_processes_at_once(course_home, made):
    parent = subprocess.run([sys.executable, "-c", EIGHT], capture_output=True, text=True, timeout=600)
    assert parent.stdout == f"made {[0] * 8}\n", parent.stderr  # by one of them
    root = course_home / "data" / "digits-v1"
    assert sums(root) == sums(made[0])
    assert sorted(p.name for p in (root / "MNIST").iterdir()) == [".made-digits", "raw"]


HALF_WAY = """
import signal
from course_lib.data import digits as data
data.TRAIN_SIZE, data.TEST_SIZE = 180, 20
write = data.Path.write_bytes
def half(path, content):
    write(path, content[:len(content) // 2])
    print("half", flush=True)
    signal.pause()
data.Path.write_bytes = half
data.digits()
"""


@pytest.fixture
def half_way(course_home):
    """A maker that has written half of its first file, and holds the lock."""
    maker = subprocess.Popen([sys.executable, "-c", HALF_WAY], stdout=subprocess.PIPE, text=True)
    try:
        assert maker.stdout.readline() == "half\n"
        assert len(list((course_home / "data" / "digits-v1" / "MNIST").glob(".making-*"))) == 1
        yield maker
    finally:
        maker.kill()
        maker.communicate()


def test_a_maker_killed_half_way_stops_and_poisons_nobody(half_way, course_home, cheap):
    half_way.send_signal(signal.SIGKILL)
    half_way.wait()
    begin = time.monotonic()
    assert len(digits()) == 180
    assert time.monotonic() - begin < data.LOCK_SECONDS / 2  # its lock died with it
    assert not list(course_home.rglob(".making-*"))  # and its half file is cleared away


def test_a_killed_maker_frees_those_who_wait(half_way, course_home):
    waiting = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
    try:
        marker = str(course_home / "data" / "digits-v1" / "MNIST" / ".made-digits")
        process = psutil.Process(waiting.pid)
        wait_for(lambda: marker in {file.path for file in process.open_files()})  # some close meanwhile
        assert waiting.poll() is None
        half_way.kill()
        assert waiting.communicate(timeout=300)[0].strip() == str(TRAIN_SIZE + TEST_SIZE)
    finally:
        waiting.kill()
        waiting.communicate()


def test_a_maker_that_never_goes_on_is_not_waited_for_for_ever(half_way, course_home, cheap, monkeypatch):
    monkeypatch.setattr(data, "LOCK_SECONDS", 0.2)
    assert len(digits()) == 180
    assert half_way.poll() is None
    assert len(list(course_home.rglob(".making-*"))) == 1  # still at work, so its folder is left alone


# Broken files


def broken(kind: str, path: Path) -> None:
    content = path.read_bytes()
    if kind == "cut short":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "cut in the header":
        path.write_bytes(content[:5])
    elif kind == "garbage":
        path.write_bytes(b"\xff" * len(content))
    elif kind == "too long":
        path.write_bytes(content + b"\0")
    elif kind == "another format":  # of the right size
        path.write_bytes(b"\x89PNG" + content[4:])
    elif kind == "gone":
        path.unlink()


KINDS = ["cut short", "cut in the header", "garbage", "too long", "another format", "gone"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES[1:3])
def test_broken_file_is_made_again(kind, name, course_home, cheap):
    digits()
    root = course_home / "data" / "digits-v1"
    good = sums(root)
    broken(kind, root / "MNIST" / "raw" / name)
    assert data._fault(root / "MNIST") is not None
    assert len(digits()) == 180
    assert sums(root) == good


def test_broken_file_in_a_root_of_ours_is_made_again(tmp_path, cheap):
    digits(root=tmp_path / "mine")
    good = sums(tmp_path / "mine")
    broken("cut short", tmp_path / "mine" / "MNIST" / "raw" / NAMES[0])
    digits(root=tmp_path / "mine")
    assert sums(tmp_path / "mine") == good


@pytest.mark.parametrize("kind", KINDS)
def test_broken_file_of_somebody_else_is_named_and_left(kind, tmp_path, cheap):
    digits(root=tmp_path)
    (tmp_path / "MNIST" / ".made-digits").unlink()  # now nothing says that the course made it
    images = tmp_path / "MNIST" / "raw" / NAMES[2]
    size = images.stat().st_size
    broken(kind, images)
    before = tree(tmp_path)
    with pytest.raises(DataError) as caught:
        digits(root=tmp_path)
    text = one_sentence(caught.value)
    assert str(images.parent) in text
    assert images.name in text
    if kind in ("cut short", "too long"):
        assert f"{images.stat().st_size:,} bytes" in text
        assert f"announces {size:,}" in text
    assert tree(tmp_path) == before


def test_labels_of_another_data_set_are_found_out(tmp_path, cheap):
    digits(root=tmp_path)
    (tmp_path / "MNIST" / ".made-digits").unlink()
    raw = tmp_path / "MNIST" / "raw"
    (raw / NAMES[1]).write_bytes((raw / NAMES[3]).read_bytes())
    with pytest.raises(DataError, match="20 labels for 180 images"):
        digits(root=tmp_path)


def test_whole_files_of_somebody_else_are_loaded_as_they_are(tmp_path, made):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in NAMES:  # only links: nothing is written there
        (raw / name).symlink_to(made[0] / "MNIST" / "raw" / name)
    assert len(digits(root=tmp_path)) == TRAIN_SIZE
    assert sorted(p.name for p in (tmp_path / "MNIST").iterdir()) == ["raw"]


def test_other_files_beside_the_digits_are_left_alone(tmp_path, cheap):
    (tmp_path / "thesis.txt").write_text("mine")
    assert len(digits(root=str(tmp_path))) == 180
    assert (tmp_path / "thesis.txt").read_text() == "mine"


# Folders that cannot be written, full disks


@pytest.mark.parametrize("below", ["file", "file/deeper", "/proc/nothing"])
def test_unwritable_root(below, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError) as caught:
        digits(root=tmp_path / below)
    text = one_sentence(caught.value)
    assert str(tmp_path / below) in text
    assert "a folder that you can write" in text
    assert (tmp_path / "file").read_text() == "mine"


def left_over(root: Path) -> list[str]:
    return [p.name for p in root.rglob("*") if p.is_file() and p.name != ".made-digits"]


def test_full_disk_leaves_nothing_half_done(tmp_path, cheap, monkeypatch):
    write = Path.write_bytes

    def full(path, content):
        if path.name.startswith("t10k"):
            write(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DataError, match=r"No space left on device.* 50 MB free"):
            digits(root=tmp_path)
    assert left_over(tmp_path) == []
    assert len(digits(root=tmp_path)) == 180  # and with space again, it goes


def test_write_that_the_kernel_stops_leaves_nothing_half_done(tmp_path, cheap):
    """The same with no patch: the kernel lets no file of this process grow beyond 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DataError, match="File too large"):
            digits(root=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left_over(tmp_path) == []


def test_interrupt_leaves_nothing_half_done(tmp_path, cheap, monkeypatch):
    def interrupted(path, content):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        digits(root=tmp_path)
    assert left_over(tmp_path) == []


def test_font_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "TRAIN_FONTS", ("NoSuchFace",))
    with pytest.raises(DataError, match=r"NoSuchFace.ttf cannot be read .* reinstall matplotlib"):
        digits(root=tmp_path)
    assert left_over(tmp_path) == []


# The download


@pytest.fixture
def closed_port(monkeypatch):
    """A mirror on this machine where nobody listens: a bound socket that never does keeps the port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{bound.getsockname()[1]}/"])
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield


def test_download_without_a_network(course_home, closed_port, cheap):
    timeout = socket.getdefaulttimeout()
    with pytest.raises(DataError) as caught:
        digits(download=True)
    text = one_sentence(caught.value)
    assert "could not be downloaded" in text
    assert "Connection refused" in text
    assert "digits() without download=True, which needs none" in text
    assert socket.getdefaulttimeout() == timeout
    assert left_over(course_home) == [".downloaded"]
    assert len(digits()) == 180


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A mirror on this machine with small files in MNIST's format, packed and with their sums."""
    import functools
    import gzip
    import http.server
    import threading

    served = tmp_path / "served"
    served.mkdir()
    resources = []
    for name in NAMES:
        count, shape = (30 if name.startswith("train") else 10), ((28, 28) if "images" in name else ())
        header = np.array([0x801 + len(shape), count, *shape], dtype=">u4").tobytes()
        packed = gzip.compress(header + bytes(count * (784 if shape else 1)))
        (served / f"{name}.gz").write_bytes(packed)
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(MNIST, "resources", resources)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Handler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_address[1]}/"])
        yield served
        server.shutdown()


def test_download_goes_into_its_own_folder_and_heals(mirror, course_home, cheap):
    digits()
    downloaded = digits(download=True)
    assert Path(downloaded.root) == course_home / "data" / "mnist"
    assert len(downloaded) == 30
    assert len(digits(False, download=True)) == 10
    assert len(digits()) == 180
    broken("cut short", course_home / "data" / "mnist" / "MNIST" / "raw" / NAMES[0])
    assert len(digits(download=True)) == 30


def test_download_never_passes_off_made_digits_as_mnist(mirror, tmp_path, cheap):
    digits(root=tmp_path / "mine")
    with pytest.raises(DataError, match="holds digits that the course made"):
        digits(root=tmp_path / "mine", download=True)


def test_download_that_arrives_damaged(mirror, course_home):
    packed = mirror / f"{NAMES[0]}.gz"
    packed.write_bytes(packed.read_bytes()[:-10] + b"\0" * 10)
    with pytest.raises(DataError, match="could not be downloaded"):
        digits(download=True)
    assert left_over(course_home) == [".downloaded"]
