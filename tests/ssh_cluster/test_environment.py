from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from paceline.doctor.checks import EXTRAS
from paceline.schedulers.ssh import SshHost
from paceline.ssh_cluster import environment
from paceline.ssh_cluster.hosts_file import ClusterConfig
from paceline.ssh_cluster.remote import RemoteHost


def test_the_wheel_is_this_paceline(tmp_path: Path) -> None:
    name, data = environment.make_wheel()
    assert environment.make_wheel() == (name, data)
    (tmp_path / name).write_bytes(data)
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*words, str(tmp_path / "into"), str(tmp_path / name)], check=True, timeout=60)
    assert (tmp_path / "into/paceline/ssh_cluster/environment.py").read_bytes() == Path(
        environment.__file__
    ).read_bytes()
    assert (tmp_path / "into/bin/paceline").exists() and list(
        (tmp_path / "into/paceline/config/presets").glob("*.yaml")
    )
    with zipfile.ZipFile(tmp_path / name) as wheel:
        assert not any("__pycache__" in each for each in wheel.namelist())


def test_versions_are_those_installed_here() -> None:
    pins = list(environment.pins())
    assert f"torch=={metadata.version('torch').partition('+')[0]}" in pins
    assert not any(pin.startswith("paceline==") or "+" in pin for pin in pins)  # this one comes as a wheel


def test_another_wish_is_another_environment() -> None:
    plain = ClusterConfig(name="lab", hosts=("a",))  # type: ignore[arg-type]
    first = environment.describe(plain)
    assert first.digest == environment.describe(plain).digest and "ray" in first.requirements[0]
    more = environment.describe(plain.model_copy(update={"install": ["mobile-env"]}))
    assert more.digest != first.digest and more.requirements[1:] == ("mobile-env",)


def test_a_command_in_a_container_and_its_variables(tmp_path: Path) -> None:
    hosts = ClusterConfig(name="lab", hosts=("localhost",), container="env WHERE={workdir}")  # type: ignore[arg-type]
    before = environment.command_prefix(hosts, str(tmp_path), "/opt/x y/bin/python", ["PYTHONPATH='/a b'"])
    said = (
        RemoteHost(SshHost(target="localhost")).run(before + "sh -c 'echo $WHERE $PYTHONPATH; echo $PATH'").splitlines()
    )
    assert said[0] == f"{tmp_path} /a b" and said[1].startswith("/opt/x y/bin:")


def test_what_does_not_fit() -> None:
    good: dict[str, str | None] = {
        "python": "3.11", "ray": "2.60", "torch": "2.13", "paceline": metadata.version("paceline"),
    }  # fmt: skip
    assert environment.differences({"a": good, "b": dict(good)}) == []
    lines = environment.differences({"a": good, "b": {**good, "ray": None}, "c": {**good, "python": "3.12"}})
    assert len(lines) == 2 and "b: ray is not installed" in lines[0] and "c: python 3.12, on a 3.11" in lines[1]
    assert "here" in environment.differences({"a": {**good, "paceline": "9.9"}})[0]


@pytest.mark.parametrize(
    ("distribution", "extra"),
    [("ray", "ray"), ("dm_tree", "rllib"), ("tensorboardX", "tune"), ("onnx", "export"), ("Box2D", "box2d")],
)
def test_hosts_get_the_extras_that_are_installed_here(
    distribution: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    found = list(metadata.distributions(path=[str(tmp_path)]))
    monkeypatch.setattr(metadata, "distributions", lambda: found)
    plain = ClusterConfig(name="lab", hosts=("a",))  # type: ignore[arg-type]
    wanted = environment.describe(plain).requirements[0]
    assert set(wanted.removeprefix("paceline[").rstrip("]").split(",")) == {"ray", extra}


def test_every_extra_for_users_can_be_found_out() -> None:
    """A new extra needs its distribution in the doctor's list."""
    offered = set(metadata.metadata("paceline").get_all("Provides-Extra") or []) - {"all", "dev"}
    assert offered == {extra for extra, _ in EXTRAS.values()}
