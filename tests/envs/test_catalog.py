from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

from paceline import machine
from paceline.envs import catalog
from paceline.envs.catalog import families, missing_package_hint, nearest, render


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Python's own way to forbid an import: None in sys.modules."""
    for package in ("Box2D", "mujoco", "ale_py", "envpool"):
        monkeypatch.setitem(sys.modules, package, None)
    return monkeypatch


def by_name() -> dict[str, catalog.EnvFamily]:
    return {family.name: family for family in families()}


def test_families_hold_the_newest_version_of_each_id() -> None:
    found = by_name()
    assert list(found) == ["Classic control", "Toy text", "Box2D", "MuJoCo", "Atari", "Procgen", "Probes"]
    assert "CartPole-v1" in found["Classic control"].ids
    assert "CartPole-v0" not in found["Classic control"].ids
    assert "Taxi-v3" in found["Toy text"].ids
    assert "LunarLander-v3" in found["Box2D"].ids
    assert "Ant-v5" in found["MuJoCo"].ids and "Ant-v4" not in found["MuJoCo"].ids
    assert len(found["Procgen"].ids) == 16 and "coinrun" in found["Procgen"].ids
    assert "paceline/Identity-v0" in found["Probes"].ids
    for family in found.values():
        keys = [env_id.rpartition("-v")[0] for env_id in family.ids if "-v" in env_id]
        assert len(keys) == len(set(keys))


def test_versions_are_compared_as_numbers() -> None:
    names = ("catalogtest/Ten-v9", "catalogtest/Ten-v10")
    for name in names:
        gymnasium.register(name, entry_point="nowhere:Ten")
    try:
        assert nearest("catalogtest/Ten-v1") == ["catalogtest/Ten-v10"]
    finally:
        for name in names:
            del gymnasium.registry[name]


def test_what_is_missing_says_how_to_install_it(without: pytest.MonkeyPatch) -> None:
    found = by_name()
    assert not any(found[name].installed for name in ("Box2D", "MuJoCo", "Atari", "Procgen"))
    assert all(found[name].installed for name in ("Classic control", "Toy text", "Probes"))
    text = render(families())
    assert 'Box2D: not installed: pip install "paceline[box2d]"' in text
    assert "Classic control: installed" in text
    assert "starpilot" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_missing_system_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ENVPOOL_LIBRARIES", ("libc.so.6", "libnowhere.so.1"))
    text = render(families())
    assert "\n  needs libnowhere.so.1: apt-get install libgl1 libglib2.0-0\n" in text
    assert max(map(len, text.splitlines())) <= 110
    monkeypatch.setattr(machine, "ENVPOOL_LIBRARIES", ("libc.so.6",))
    assert "needs" not in render(families())


@pytest.mark.parametrize(
    ("env_id", "extra"),
    [
        ("LunarLander-v3", "box2d"),
        ("Ant-v5", "mujoco"),
        ("Ant-v4", "mujoco"),
        ("Ant", "mujoco"),
        ("ALE/Pong-v5", "atari"),
        ("PongNoFrameskip-v4", "atari"),
        ("coinrun", "procgen"),
        ("procgen-coinrun-v0", "procgen"),
        ("procgen:procgen-coinrun-v0", "procgen"),
    ],
)
def test_hint_for_a_missing_package(without: pytest.MonkeyPatch, env_id: str, extra: str) -> None:
    hint = missing_package_hint(env_id)
    assert hint is not None
    assert hint.startswith(env_id) and hint.endswith(f'pip install "paceline[{extra}]"') and "\n" not in hint


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Nothing-v0", "my_env.py:Ant", "paceline/Identity-v0", ""])
def test_no_hint_where_no_package_is_missing(without: pytest.MonkeyPatch, env_id: str) -> None:
    assert missing_package_hint(env_id) is None


def test_no_hint_for_an_installed_package() -> None:
    pytest.importorskip("Box2D")
    assert missing_package_hint("LunarLander-v3") is None


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("CartPole-v2", "CartPole-v1"),
        ("cartpole", "CartPole-v1"),
        ("Cartpol-v1", "CartPole-v1"),
        ("LunarLander-v2", "LunarLander-v3"),
        ("Identity", "paceline/Identity-v0"),
        ("paceline/ImageSides-v0", "paceline/ImageSide-v0"),
        ("procgen-coinrum-v0", "coinrun"),
    ],
)
def test_nearest(given: str, meant: str) -> None:
    assert nearest(given)[0] == meant


@pytest.mark.parametrize("given", ["qqqqq", ""])
def test_nothing_is_near_to_nonsense(given: str) -> None:
    assert nearest(given) == []


def test_games_of_an_installed_ale_are_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ale_py"
    (package / "roms").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    for game in ("pong", "space_invaders", "warlords"):
        (package / "roms" / f"{game}.bin").touch()
    monkeypatch.delitem(sys.modules, "ale_py", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    registered = [env_id for env_id, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("ale_py")]
    for env_id in registered:
        monkeypatch.delitem(gymnasium.registry, env_id)
    atari = by_name()["Atari"]
    assert atari.installed
    assert atari.ids == ("ALE/Pong-v5", "ALE/SpaceInvaders-v5")
    assert nearest("Pong-v5") == ["ALE/Pong-v5"]


def test_a_folder_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not catalog.is_installed("only_a_folder")
    assert catalog.is_installed("gymnasium")


def test_listing_imports_nothing_heavy() -> None:
    code = (
        "import sys; from paceline.envs import catalog; catalog.render(catalog.families()); catalog.nearest('Ant');"
        "print([m for m in ('torch', 'ray', 'Box2D', 'mujoco', 'ale_py', 'envpool', 'pygame') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
