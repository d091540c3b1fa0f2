from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.launch import rendezvous
from paceline.launch.rendezvous import Contact, new_key

CONTACT = Contact(["10.0.0.1", "127.0.0.1"], 4711, new_key(), "ib0")


def test_a_file_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "job"
    rendezvous.write(path, CONTACT)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o077 == 0
    assert rendezvous.read(path) == CONTACT and list(path.parent.iterdir()) == [path]


def test_one_left_from_yesterday_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "job"
    rendezvous.write(path, Contact(["10.0.0.9"], 1, new_key()))
    path.chmod(0o644)
    rendezvous.write(path, CONTACT)
    assert rendezvous.read(path) == CONTACT and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": 1}', CONTACT.line()[:-9]])
def test_what_is_not_there_or_not_whole_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job"
    assert rendezvous.read(path) is None
    path.touch(mode=0o600)
    path.write_text(text)
    assert rendezvous.read(path) is None


def test_a_file_that_others_could_have_written_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "job"
    rendezvous.write(path, CONTACT)
    path.chmod(0o660)
    assert rendezvous.read(path) is None
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        assert rendezvous.read(path) is None


def test_the_folder_is_the_users_or_the_one_named(tmp_path: Path) -> None:
    assert rendezvous.folder({rendezvous.FOLDER: str(tmp_path)}) == tmp_path
    assert rendezvous.folder({}) == Path.home() / ".paceline/rendezvous"
