from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from paceline.tune.transfer import pack_run, unpack_run


def test_a_run_survives_an_unpack_that_was_cut_short(tmp_path: Path) -> None:
    run, old = tmp_path / "0-seed0", tmp_path / ".0-seed0.old"
    run.mkdir()
    (run / "metrics.jsonl").write_text("1")
    content = pack_run(run)
    assert content is not None
    run.rename(old)  # and killed before the new one took its place
    assert pack_run(run) == content and run.is_dir() and not old.exists()
    run.rename(old)
    with pytest.raises(tarfile.ReadError):
        unpack_run(b"no archive", run)
    assert (run / "metrics.jsonl").read_text() == "1"
    unpack_run(content, run)
    assert [path.name for path in tmp_path.iterdir()] == ["0-seed0"]
