"""A Slurm of two nodes on this machine: it comes up, says what is missing, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import missing
from tests.support.processes import processes_marked, unless_gone, wait_for

SCRIPTS = Path(__file__).parents[2] / "lessons" / "scripts"
sys.path.insert(0, str(SCRIPTS))

import slurm_here  # noqa: E402  (beside the lessons)

MARK = "COURSE_SLURM_MARK"
KEEP = """
import subprocess, sys, time
sys.path.insert(0, {scripts!r})
from slurm_here import two_nodes

def said(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout

with two_nodes() as here:
    print(said("sinfo", "-hNo", "%N %t").split(), flush=True)
    print(said("sbatch", "--wrap", "sleep 600"), end="", flush=True)
    print(here.folder, flush=True)
    while "R" not in said("squeue", "-ho", "%t"):
        time.sleep(0.1)
    print("at work", flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["pass", "time.sleep(600)"], ids=["told", "its parent is killed"])
def test_it_comes_up_and_leaves_nothing(then: str, tmp_path: Path) -> None:
    if reason := slurm_here.missing():
        missing(reason)
    parent = subprocess.Popen(
        [sys.executable, "-c", KEEP.format(scripts=str(SCRIPTS), then=then)],
        env={**os.environ, MARK: str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )

    def at_work() -> set[str]:
        return {unless_gone(each.name, "") for each in processes_marked(MARK, str(tmp_path))} - {""}

    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "['node1', 'idle', 'node2', 'idle']\n"
        assert re.fullmatch(r"Submitted batch job \d+\n", parent.stdout.readline())
        folder = Path(parent.stdout.readline().strip())
        assert (folder / "slurm.conf").exists()
        assert parent.stdout.readline() == "at work\n"
        if then != "pass":
            wait_for(lambda: {"munged", "slurmctld", "slurmd", "sleep"} <= at_work(), what="the job")
    finally:
        if then != "pass":
            parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_for(lambda: not at_work(), what="all that it started to be gone")
    wait_for(lambda: not folder.exists(), what="its folder to be gone")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    there = slurm_here.shutil.which
    monkeypatch.setattr(
        slurm_here.shutil, "which", lambda name, **_: None if "d" in name[-1:] else there("true")
    )
    words = "a Slurm on one machine needs munged, slurmctld, slurmd: as root on Debian or Ubuntu, apt-get "
    assert slurm_here.missing() == words + "install --no-install-recommends slurm-wlm munge"
    with pytest.raises(slurm_here.NoSlurmHere, match=words):
        slurm_here.SlurmHere()


def test_a_daemon_that_does_not_come_up_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here munged, the first of all, is another program, which ends at once."""
    if reason := slurm_here.missing():
        missing(reason)
    (tmp_path / "munged").write_text("#!/bin/sh\necho no key >&2\nexit 1\n")
    (tmp_path / "munged").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm_here, "TRIES", 1)
    with pytest.raises(slurm_here.NoSlurmHere, match=r"did not come up: munged ended at once: .*no key"):
        slurm_here.SlurmHere()
