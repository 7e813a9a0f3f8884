"""Bytes that a rank has sent, by the system's own count."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from course_lib import bytes_sent, launch

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts for each connection")


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


@linux
def test_a_connection_with_two_descriptors_counts_once() -> None:
    one, other = pair()
    with one, other:
        one.sendall(bytes(1000))
        other.recv(1000, socket.MSG_WAITALL)
        before = bytes_sent()
        with one.dup():
            assert bytes_sent() == before


@linux
def test_a_stream_that_is_not_tcp_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bytes:
        raise OSError(95, "Operation not supported")

    one, other = pair()
    with one, other:
        monkeypatch.setattr(socket.socket, "getsockopt", refuse)
        assert bytes_sent() is None


@linux
def test_no_descriptor_is_left_open() -> None:
    one, other = pair()
    with one, other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX):
        before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
        for _ in range(5):
            assert bytes_sent() is not None
        assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == before


def test_another_system_says_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", mock.Mock(side_effect=FileNotFoundError))  # no /proc
    assert bytes_sent() is None


@linux
def test_a_rank_counts_what_its_all_reduce_sends() -> None:
    def work() -> Any:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.ones(300_000)
        dist.barrier()
        before = bytes_sent()
        dist.all_reduce(tensor)
        dist.barrier()
        sent = bytes_sent() - before  # type: ignore[operator]
        dist.barrier()  # all have read: who leaves now closes its connections
        return sent / tensor.nbytes

    run = launch(work, nprocs=3, device="cpu", timeout=600, dashboard=False)
    assert run.results == pytest.approx([4 / 3] * 3, rel=0.02)
