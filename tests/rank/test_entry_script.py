"""What a rank of torchrun does before its script runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from course_lib.rank import entry_script
from course_lib.rank.recorder import Recorder
from course_lib.run_folder import RankFiles


def test_a_restarted_rank_knows_what_was_written_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, the pid was that of its rank; here, it may be that of anything."""
    files = RankFiles(tmp_path, 0)
    assert not entry_script._of_this_node(files.facts)
    monkeypatch.setenv("SLURM_NODEID", "1")
    Recorder(files)
    assert entry_script._of_this_node(files.facts)
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert not entry_script._of_this_node(files.facts)
