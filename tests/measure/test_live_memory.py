"""The ledger of live tensors: storages counted once, under their first owner, as long as they live."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from course_lib import LiveMemory

KIB = 1024


def block(kib: int = 1) -> torch.Tensor:
    return torch.zeros(kib * KIB, dtype=torch.uint8)


def test_bytes_by_owner_and_kind() -> None:
    memory, a, b, c = LiveMemory(), block(1), block(2), block(4)
    memory.note("device 0", "parameters", [a, b])
    memory.note("device 0", "gradients", [c])
    memory.note("device 1", "parameters", iter([block(8)]))  # freed at once
    assert memory.bytes() == {"device 0": {"parameters": 3 * KIB, "gradients": 4 * KIB}}


def test_nothing_noted_is_nothing() -> None:
    memory = LiveMemory()
    memory.note("device 0", "gradients", [None])
    assert memory.bytes() == {}


def test_views_of_one_storage_count_once_and_whole() -> None:
    memory, whole = LiveMemory(), block(4)
    memory.note(0, "chunk", whole.chunk(4))
    memory.note(1, "batch", [whole])
    assert memory.bytes() == {0: {"chunk": 4 * KIB}}


def test_a_storage_belongs_to_who_noted_it_first() -> None:
    memory, weight = LiveMemory(), block()
    memory.note(0, "parameters", [weight])
    memory.note(1, "activations", [weight])
    assert memory.bytes() == {0: {"parameters": KIB}}


def test_what_is_freed_counts_no_longer_and_its_address_may_serve_another() -> None:
    memory, kept = LiveMemory(), block()
    memory.note(0, "kept", [kept])
    for _ in range(100):  # the allocator hands the same memory out again and again
        passing = block()
        memory.note(1, "passing", [passing])
        assert memory.bytes() == {0: {"kept": KIB}, 1: {"passing": KIB}}
        del passing
        assert memory.bytes() == {0: {"kept": KIB}}


def test_a_view_keeps_the_storage_alive() -> None:
    memory, whole = LiveMemory(), block(4)
    memory.note(0, "batch", [whole])
    part = whole[:1]
    del whole
    assert memory.bytes() == {0: {"batch": 4 * KIB}}
    del part
    assert memory.bytes() == {}


def test_activations_are_what_backward_needs_and_live_until_then() -> None:
    memory, model = LiveMemory(), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    memory.note(0, "parameters", model.parameters())
    with memory.saving(0):
        loss = model(x).sum()
    parameters = (8 * 16 + 16 + 16 * 4 + 4) * 8
    hidden = 5 * 16 * 8  # tanh's output, which the second layer saves as well
    batch = 5 * 8 * 8  # the first layer's input
    assert memory.bytes() == {0: {"parameters": parameters, "activations": hidden + batch}}
    loss.backward()
    assert memory.bytes() == {0: {"parameters": parameters, "activations": batch}}, (
        "x is alive, hidden is not"
    )


def test_the_gradients_are_the_same_with_it() -> None:
    model, x = (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double(),
        torch.randn(5, 8).double(),
    )
    plain = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with LiveMemory().saving(0):
        loss = model(x).square().sum()
    for one, other in zip(plain, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_each_thread_notes_for_its_own_owner() -> None:
    memory, weight, kept = LiveMemory(), torch.randn(64, 64, requires_grad=True), []
    together = threading.Barrier(4)

    def forward(owner: int) -> None:
        x = torch.randn(owner + 1, 64)
        together.wait()
        with memory.saving(owner):
            for _ in range(50):
                kept.append((x @ weight).tanh())

    memory.note("all", "parameters", [weight])
    threads = [threading.Thread(target=forward, args=[owner]) for owner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = memory.bytes()
    assert counted.pop("all") == {"parameters": 64 * 64 * 4}
    for owner in range(4):
        rows = owner + 1
        assert counted[owner] == {"activations": 50 * rows * 64 * 4 + rows * 64 * 4}


def test_outside_of_the_block_nothing_is_noted() -> None:
    memory, weight = LiveMemory(), torch.randn(4, 4, requires_grad=True)
    with memory.saving(0):
        pass
    output = (weight @ weight).tanh()
    assert memory.bytes() == {}
    del output


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        (torch.zeros(3), TypeError, "put it in"),
        ([1.5], TypeError, "1.5, a float"),
        (["weight"], TypeError, "'weight', a str"),
        ([torch.zeros(3, device="meta")], ValueError, "holds no memory"),
        ([torch.eye(3).to_sparse()], TypeError, "torch.sparse_coo"),
    ],
)
def test_what_cannot_be_counted_is_refused(tensors: object, error: type[Exception], words: str) -> None:
    memory = LiveMemory()
    with pytest.raises(error, match=words):
        memory.note(0, "parameters", tensors)  # type: ignore[arg-type]
    assert memory.bytes() == {}
