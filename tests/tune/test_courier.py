from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from paceline.tune.courier import pack, unpack


def test_a_run_is_there_after_an_unpack_that_was_cut_short(tmp_path: Path) -> None:
    run, old = tmp_path / "0-seed0", tmp_path / ".0-seed0.old"
    run.mkdir()
    (run / "metrics.jsonl").write_text("1")
    content = pack(run)
    assert content is not None
    run.rename(old)  # and killed before the new one took its place
    assert pack(run) == content and run.is_dir() and not old.exists()
    run.rename(old)
    with pytest.raises(tarfile.ReadError):
        unpack(b"no archive", run)
    assert (run / "metrics.jsonl").read_text() == "1"
    unpack(content, run)
    assert [path.name for path in tmp_path.iterdir()] == ["0-seed0"]
