"""What judges draw: tensors, models, folders and machines of more than one kind."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from course_lib.exercises import inputs
from course_lib.exercises.inputs import (
    folder,
    machine,
    network,
    own_randomness,
    seeds,
    tensor,
    trainable,
)


def _all_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def test_a_network_is_of_many_kinds() -> None:
    forms = set()
    for kind in range(20):
        model = network(kind, values=5)
        again = network(kind, values=6)
        names, others = _all_tensors(model), _all_tensors(again)
        forms.add(tuple((name, tuple(value.shape), value.requires_grad) for name, value in names.items()))
        assert [numbers.shape for numbers in names.values()] == [other.shape for other in others.values()]
        assert all((a != b).any() for a, b in zip(names.values(), others.values(), strict=True))
        assert len(names) > len(model.state_dict()) - 1, "one weight has two names, one buffer is not saved"
        assert "body.inner_layers.tied_.offset" not in model.state_dict()
        assert not all(parameter.requires_grad for parameter in model.parameters())
        assert {module.training for module in model.modules()} == {True, False}
        assert model(tensor(1, (6, 4))).isfinite().all()
    assert len(forms) > 10


def test_what_is_frozen_is_not_trainable() -> None:
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    assert trainable(model) == [model.weight]


def test_seeds_are_apart() -> None:
    assert len(set(seeds(random.Random(1), 50))) == 50


@pytest.mark.parametrize("other_disk", [inputs.OTHER_DISK, Path("/no/such/disk")], ids=["Linux", "elsewhere"])
def test_a_folder_is_gone_afterwards(other_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "OTHER_DISK", other_disk)
    with folder() as path:
        assert list(path.iterdir()) == []
        (path / "file").write_text("x")
    assert not path.exists()


def test_a_machine_has_the_gpus_and_cores_that_it_says() -> None:
    before = os.cpu_count(), torch.cuda.is_available()
    with machine(gpus=3, environment={"LOCAL_RANK": "2"}, cores=5):
        assert torch.cuda.is_available()
        assert (torch.cuda.device_count(), torch.accelerator.device_count()) == (3, 3)
        assert (os.cpu_count(), len(os.sched_getaffinity(0)), os.environ["LOCAL_RANK"]) == (5, 5, "2")
        torch.cuda.set_device(2)
    with machine(gpus=0):
        assert not torch.cuda.is_available()
    assert (os.cpu_count(), torch.cuda.is_available()) == before


def test_processes_share_neither_rng_state_nor_the_hash_of_a_text() -> None:
    def shown() -> list[object]:
        return [torch.rand(()).item(), random.random(), np.random.rand(), hash("a"), hash(("a", 1))]

    draws = []
    for seed in (1, 2, 1):
        with own_randomness(seed):
            draws.append(shown())
            assert hash((3, 4)) == (3, 4).__hash__(), "numbers have one hash everywhere"
    assert draws[0] == draws[2]
    assert all(one != other for one, other in zip(*draws[:2], strict=True))
