"""course_lib.data.digits: what is drawn."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST

from course_lib.data import digits as data
from course_lib.data.digits import TEST_FONTS, TEST_SIZE, TRAIN_FONTS, TRAIN_SIZE, digits

pytestmark = pytest.mark.usefixtures("digits_are_there")


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same(one: MNIST, other: MNIST) -> bool:
    return torch.equal(one.data, other.data) and torch.equal(one.targets, other.targets)


def test_two_makings_give_the_same_digits(tmp_path, monkeypatch, one_thread):
    """With one thread and with several."""
    before = [digits(), digits(False)]
    torch.set_num_threads(3)
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "another"))
    assert all(map(same, before, [digits(), digits(False)]))


def test_sizes_classes_and_default_transform():
    for train, size in ((True, TRAIN_SIZE), (False, TEST_SIZE)):
        dataset = digits(train)
        assert isinstance(dataset, MNIST)
        assert len(dataset) == size
        assert torch.bincount(dataset.targets).tolist() == [size // 10] * 10
        image, label = dataset[0]
        assert image.shape == (1, 28, 28)
        assert image.dtype == torch.float32
        assert isinstance(label, int)


def test_labels_come_in_no_order():
    """Each of two ranks' interleaved shards sees every class about equally often."""
    for shard in (digits().targets[rank::2] for rank in range(2)):
        counts = torch.bincount(shard, minlength=10)
        assert counts.min() > 0.8 * counts.max()


def test_mean_and_std_are_those_of_the_training_digits():
    pixels = digits().data.double() / 255
    assert pixels.mean().item() == pytest.approx(data.MEAN, abs=2e-4)  # a stand-in for a typeface moves them
    assert pixels.std().item() == pytest.approx(data.STD, abs=2e-4)
    assert f"mean {data.MEAN} and standard deviation {data.STD}" in digits.__doc__
    batch = next(iter(DataLoader(digits(), 2000)))[0]
    assert batch.mean().item() == pytest.approx(0, abs=0.05)
    assert batch.std().item() == pytest.approx(1, abs=0.05)


def test_held_out_digits_share_no_picture_with_training():
    def pictures(train):
        return {image.numpy().tobytes() for image in digits(train).data}

    train, test = pictures(True), pictures(False)
    assert len(train) == TRAIN_SIZE  # not one of them twice
    assert len(test) == TEST_SIZE
    assert not train & test


def test_each_set_is_drawn_in_its_own_typefaces(tmp_path, monkeypatch):
    """With the training typefaces black all over and the test's white, so are the pictures."""
    assert not set(TRAIN_FONTS) & set(TEST_FONTS)
    sheets = {TRAIN_FONTS: torch.zeros, TEST_FONTS: torch.ones}
    monkeypatch.setattr(data, "_glyphs", lambda fonts: sheets[fonts](len(fonts), 3, 10, 64, 64))
    monkeypatch.setattr(data, "TRAIN_SIZE", 180)
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "another"))
    assert digits(True).data.max() < 30
    assert digits(False).data[:, 14, 14].min() > 150


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


def test_a_typeface_that_matplotlib_lacks_changes_no_other_picture(tmp_path, monkeypatch):
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
    before = [digits(), digits(False)]
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "another"))
    after = [digits(), digits(False)]
    assert torch.equal(before[0].targets, after[0].targets)
    assert same(before[1], after[1])
    here, there = before[0].data, after[0].data
    changed = (here != there).any(2).any(1).double().mean().item()
    whole = all((fonts / f"{name}.ttf").exists() for name in TRAIN_FONTS)
    assert changed == pytest.approx(whole / len(TRAIN_FONTS), abs=0.01)


def test_a_missing_font_is_told_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "another"))
    with pytest.raises(RuntimeError, match=r"matplotlib lacks its font \w+\.ttf, .*: reinstall it"):
        digits()
