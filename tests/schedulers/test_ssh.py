from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.schedulers import ssh
from paceline.schedulers.scheduler import Host


def test_the_hosts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\nnode1\n\nme@node2:2222 cpus=8 gpus=1  # fast\n10.0.0.3\n")
    expected = (Host("node1"), Host("me@node2:2222", cpus=8, gpus=1), Host("10.0.0.3"))
    found = ssh.allocation(path)
    assert found.hosts == expected and found.rank is None and found.scheduler == "ssh"


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no hosts"), ("a\na\n", "twice"), ("a cpus=many", "cpus=many"), ("a slots=4", "slots=4"), ("-oX", "-oX")],
)
def test_what_is_wrong_with_a_file_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        ssh.allocation(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        ssh.allocation(tmp_path / "none")


def test_the_words_survive_the_shell_over_there() -> None:
    argv = ["python", "-c", "print('a  b', \"$HOME\")"]
    made = ssh.remote_argv("me@node2", argv, {"A": "x y"})
    assert made[0] == "ssh" and made[-2] == "me@node2"
    assert shlex.split(made[-1]) == ["env", "A=x y", *argv]
    assert ssh.remote_argv("me@node2:2222", argv, {})[-4:-1] == ["-p", "2222", "me@node2"]
