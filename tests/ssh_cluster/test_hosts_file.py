from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import UserError
from paceline.schedulers.ssh import SshHost, allocation
from paceline.ssh_cluster.cluster_state import ClusterState, find, load, save
from paceline.ssh_cluster.hosts_file import read_hosts_file

RAY = """
cluster_name: deepcomp
max_workers: 2
provider: {type: local, head_ip: 10.0.0.1, worker_ips: [10.0.0.2, 10.0.0.3]}
auth: {ssh_user: stefan, ssh_private_key: ~/.ssh/id_rsa}
rsync_exclude: ["**/.git", results]
setup_commands: [pip install mobile-env]
head_start_ray_commands: [ray stop, ray start --head]
"""

# All that Ray's example for existing machines has, as one finds it in projects: most of it left as it came.
EXAMPLE = """
cluster_name: office
min_workers: 2
max_workers: 2
upscaling_speed: 1.0
idle_timeout_minutes: 5
docker: ""
provider:
    type: local
    head_ip: one.example.org
    worker_ips:
        - two.example.org
        - three.example.org
auth:
    ssh_user: ann
    ssh_private_key: ~/.ssh/id_ed25519
head_node: {}
worker_nodes: {}
file_mounts: {}
cluster_synced_files: []
file_mounts_sync_continuously: False
rsync_exclude: ["**/.git", "**/.git/**"]
rsync_filter: [.gitignore]
initialization_commands: []
setup_commands: []
head_setup_commands: []
worker_setup_commands: []
head_start_ray_commands:
    - ray stop
    - ulimit -c unlimited && ray start --head --port=6379 --autoscaling-config=~/ray_bootstrap_config.yaml
worker_start_ray_commands:
    - ray stop
    - ray start --address=$RAY_HEAD_IP:6379
"""
# The keys of other versions of Ray, older and newer, each with a value.
OTHERS = """
initial_workers: 1
autoscaling_mode: default
target_utilization_fraction: 0.8
no_restart: true
metadata: {owner: ann}
head_node: {InstanceType: m5.large}
worker_nodes: {InstanceType: m5.large}
head_node_type: one
available_node_types: {one: {resources: {CPU: 4}}}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_list_of_hosts(tmp_path: Path) -> None:
    hosts, notices = read_hosts_file(write(tmp_path, "lab", "# ours\nann@node0:2222 cpus=8 gpus=1\n\nnode1 # slow\n"))
    assert hosts.name == "lab" and notices == []
    assert hosts.hosts == (SshHost(target="ann@node0", port=2222, cpus=8, gpus=1), SshHost(target="node1"))
    assert hosts.head.name == "node0"


def test_a_yaml_file(tmp_path: Path) -> None:
    text = "name: big\nhosts: [a, b cpus=4]\nworkdir: ~/w\npackages: [../my_env]\nextras: [procgen]\n"
    hosts, _ = read_hosts_file(write(tmp_path, "lab.yaml", text))
    assert hosts.name == "big" and [each.cpus for each in hosts.hosts] == [0, 4] and hosts.extras == ["procgen"]
    assert hosts.packages == [str(tmp_path / "../my_env")]


def test_a_file_of_rays(tmp_path: Path) -> None:
    hosts, notices = read_hosts_file(write(tmp_path, "cluster.yaml", RAY))
    assert hosts.name == "deepcomp" and [each.target for each in hosts.hosts] == [
        "stefan@10.0.0.1",
        "stefan@10.0.0.2",
        "stefan@10.0.0.3",
    ]
    assert hosts.key == str(Path("~/.ssh/id_rsa").expanduser()) and hosts.setup == ["pip install mobile-env"]
    assert hosts.exclude == ["**/.git", "results"]
    assert any("head_start_ray_commands is not used" in line for line in notices) and len(notices) == 2


def test_rays_whole_example(tmp_path: Path) -> None:
    hosts, notices = read_hosts_file(write(tmp_path, "cluster.yaml", EXAMPLE))
    assert hosts.name == "office" and [each.label for each in hosts.hosts] == [
        f"ann@{name}.example.org" for name in ("one", "two", "three")
    ]
    assert hosts.container is None and hosts.exclude == ["**/.git", "**/.git/**"]
    assert not any("head_node" in line or "file_mounts" in line for line in notices)  # empty: nothing to tell


def test_keys_of_all_versions_of_ray_are_ignored_with_a_word(tmp_path: Path) -> None:
    small = RAY.replace("ssh_user: stefan", "ssh_user: stefan, ssh_proxy_command: nc, ssh_public_key: x.pub")
    small += "docker: {image: me/rl, pull_before_run: true, container_name: ray, head_image: me/gpu}\n"
    hosts, notices = read_hosts_file(write(tmp_path, "cluster.yaml", small + OTHERS))
    told = {line.partition(" is not used: ")[0] for line in notices}
    assert {line.partition(":")[0] for line in OTHERS.strip().splitlines()} <= told
    assert {"auth.ssh_proxy_command", "auth.ssh_public_key", "docker.pull_before_run", "docker.head_image"} <= told
    assert all(line.partition(": ")[2] for line in notices) and len(hosts.hosts) == 3


def test_commands_for_the_head_or_the_workers_run_everywhere(tmp_path: Path) -> None:
    text = EXAMPLE.replace("head_setup_commands: []", "head_setup_commands: [make tools]")
    text = text.replace("worker_setup_commands: []", "worker_setup_commands: [make data]")
    hosts, notices = read_hosts_file(write(tmp_path, "cluster.yaml", text))
    assert hosts.setup == ["make tools", "make data"]
    assert sum("run on every host" in line for line in notices) == 2


def test_a_file_of_rays_with_keys_of_ours(tmp_path: Path) -> None:
    ours = "pip: [--no-index]\npackages: [env]\nextras: [ray, rllib]\ninstall: [mobile-env]\nworkdir: ~/w\n"
    ours += "setup: [echo ours]\nexclude: [data]\nkey: ~/.ssh/lab\n"
    hosts, _ = read_hosts_file(write(tmp_path, "cluster.yaml", RAY + ours))
    assert hosts.pip == ["--no-index"] and hosts.packages == [str(tmp_path / "env")] and hosts.workdir == "~/w"
    assert hosts.extras == ["ray", "rllib"] and hosts.install == ["mobile-env"]
    assert hosts.setup == ["pip install mobile-env", "echo ours"] and hosts.exclude == ["**/.git", "results", "data"]
    assert hosts.key == str(Path("~/.ssh/lab").expanduser()) and hosts.head.target == "stefan@10.0.0.1"


def test_a_container_of_rays(tmp_path: Path) -> None:
    docker = RAY + "docker: {image: me/rl, run_options: [--shm-size=3g]}\n"
    hosts, _ = read_hosts_file(write(tmp_path, "cluster.yaml", docker))
    assert hosts.container is not None
    assert hosts.container.startswith("docker run ") and hosts.container.endswith("--shm-size=3g me/rl")
    hosts, _ = read_hosts_file(write(tmp_path, "cluster.yaml", docker.replace("image:", "use_podman: true, image:")))
    assert hosts.container is not None and hosts.container.startswith("podman run ")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("lab", "node0 cores=3\n", "'cores=3' is not a setting of a host"),
        ("lab", "-oProxyCommand=x\n", "is not a host"),
        ("lab", "a\na cpus=2\n", "a is listed twice"),
        ("lab", "# nothing\n", "no hosts ("),
        ("lab.yaml", "hosts: [a]\npyton: x\n", "pyton: unknown; did you mean python?"),
        ("lab.yaml", "pyton: x\n", "pyton: unknown"),
        ("lab.yaml", "hosts: a\n", "a list of hosts"),
        ("lab.yaml", "hosts: [a]\nworkdir: here\n", "begins with / or ~"),
        ("lab.yaml", "hosts: [a]\nworkdir: /x; rm -rf y\n", "begins with / or ~"),
        ("lab.yaml", "hosts: [a\n", "not YAML"),
        ("c.yaml", RAY.replace("auth:", "auht:"), "auht: unknown; did you mean auth?"),
        ("c.yaml", RAY.replace("local", "aws"), "provider.type=aws: only local is supported"),
        ("c.yaml", RAY.replace("head_ip", "head"), "provider.head: unknown; did you mean head_ip?"),
        ("c.yaml", RAY + "hosts: [a]\n", "hosts: unknown"),
        ("c.yaml", RAY.replace("[pip install mobile-env]", "pip install x"), "setup_commands=pip install x: expected"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=r".") as error:
        read_hosts_file(write(tmp_path, name, text))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_not_utf_8(tmp_path: Path) -> None:
    for name in ("lab", "lab.yaml"):
        (tmp_path / name).write_bytes("# Büro\nnode0\n".encode("latin-1"))
        with pytest.raises(UserError, match=r"not UTF-8 text; give a hosts file"):
            read_hosts_file(tmp_path / name)
    with pytest.raises(UserError, match=r"--hosts .*lab: not UTF-8 text; give a file with one host per line"):
        allocation(tmp_path / "lab")
    (tmp_path / "lab").write_bytes("node0\r\nnode1\r\n".encode("utf-8-sig"))  # as editors of Windows write it
    assert [host.name for host in allocation(tmp_path / "lab").hosts] == ["node0", "node1"]
    assert read_hosts_file(tmp_path / "lab")[0].head.name == "node0"


def test_a_cluster_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = write(tmp_path, "lab", "node0 cpus=2\nnode1\n")
    up = ClusterState(config=read_hosts_file(path)[0], workdir="/w", python="/w/python", digest="abc")
    save(up)
    assert load("lab") == up and find(str(path)) == up
    with pytest.raises(UserError, match=r"no cluster lib \(lab\)"):
        load("lib")
