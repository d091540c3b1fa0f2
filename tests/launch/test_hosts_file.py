from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.launch.hosts_file import Machine, Up, find, load, read_hosts, save

RAY = """
cluster_name: deepcomp
max_workers: 2
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}
auth: {ssh_user: stefan, ssh_private_key: ~/.ssh/id_rsa}
rsync_exclude: ["**/.git", results]
setup_commands: [pip install mobile-env]
head_start_ray_commands: [ray stop, ray start --head]
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_list_of_hosts(tmp_path: Path) -> None:
    hosts, notices = read_hosts(write(tmp_path, "lab", "# ours\nann@node0:2222 cpus=8 gpus=1\n\nnode1 # slow\n"))
    assert hosts.name == "lab" and notices == []
    assert hosts.hosts == (Machine(target="ann@node0", port=2222, cpus=8, gpus=1), Machine(target="node1"))
    assert hosts.head.name == "node0"


def test_a_yaml_file(tmp_path: Path) -> None:
    text = "name: big\nhosts: [a, b cpus=4]\nworkdir: ~/w\npackages: [../my_env]\nextras: [procgen]\n"
    hosts, _ = read_hosts(write(tmp_path, "lab.yaml", text))
    assert hosts.name == "big" and [each.cpus for each in hosts.hosts] == [0, 4] and hosts.extras == ["procgen"]
    assert hosts.packages == [str(tmp_path / "../my_env")]


def test_a_file_of_rays(tmp_path: Path) -> None:
    hosts, notices = read_hosts(write(tmp_path, "cluster.yaml", RAY))
    assert hosts.name == "deepcomp" and [each.target for each in hosts.hosts] == [
        "stefan@10.0.0.1",
        "stefan@10.0.0.2",
        "stefan@10.0.0.3",
    ]
    assert hosts.key == str(Path("~/.ssh/id_rsa").expanduser()) and hosts.setup == ["pip install mobile-env"]
    assert hosts.exclude == ["**/.git", "results"]
    assert any("head_start_ray_commands is not used" in line for line in notices) and len(notices) == 2


def test_a_container_of_rays(tmp_path: Path) -> None:
    docker = RAY + "docker: {image: me/rl, run_options: [--shm-size=3g]}\n"
    hosts, _ = read_hosts(write(tmp_path, "cluster.yaml", docker))
    assert hosts.container is not None
    assert hosts.container.startswith("docker run ") and hosts.container.endswith("--shm-size=3g me/rl")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("lab", "node0 cores=3\n", "'cores=3' is not understood"),
        ("lab", "-oProxyCommand=x\n", "is no host"),
        ("lab", "a\na cpus=2\n", "a stands there twice"),
        ("lab", "# nothing\n", "no host in it"),
        ("lab.yaml", "hosts: [a]\npyton: x\n", "pyton: unknown; did you mean python?"),
        ("lab.yaml", "pyton: x\n", "pyton: unknown"),
        ("lab.yaml", "hosts: a\n", "a list of hosts"),
        ("lab.yaml", "hosts: [a]\nworkdir: here\n", "begins with / or ~"),
        ("lab.yaml", "hosts: [a]\nworkdir: /x; rm -rf y\n", "begins with / or ~"),
        ("lab.yaml", "hosts: [a\n", "not YAML"),
        ("c.yaml", RAY.replace("auth:", "auht:"), "auht: unknown; did you mean auth?"),
        ("c.yaml", RAY.replace("local", "aws"), "provider.type=aws: only local"),
        ("c.yaml", RAY.replace("head_ip", "head"), "provider.head: unknown; did you mean head_ip?"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=r".") as error:
        read_hosts(write(tmp_path, name, text))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_cluster_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = write(tmp_path, "lab", "node0 cpus=2\nnode1\n")
    up = Up(hosts=read_hosts(path)[0], workdir="/w", python="/w/python", digest="abc")
    save(up)
    assert load("lab") == up and find(str(path)) == up
    with pytest.raises(UserError, match=r"no cluster lib \(lab\)"):
        load("lib")
