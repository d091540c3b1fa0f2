"""What can be trained on here: the families of environments, what is installed, and which id was probably meant."""

from __future__ import annotations

import difflib
import importlib.util
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import gymnasium
from gymnasium.envs.registration import EnvSpec

from paceline.env.probe import register_probes
from paceline.env.procgen import GAMES, bare_name, game_of

_ID = re.compile(r"(?:(?P<namespace>.+)/)?(?P<name>.*?)(?:-v(?P<version>\d+))?", re.DOTALL)
_OLD_ATARI = re.compile(r"\w+(?:NoFrameskip|Deterministic|-ram\w*)-v\d")
# ALE has these for several players only and registers no env for them.
_ATARI_MULTIPLAYER = {"combat", "joust", "maze_craze", "warlords"}
_CLOSE = 0.65


@dataclass(frozen=True)
class Family:
    name: str
    module: str
    """Where the classes of these envs live: the start of their entry points."""
    ids: tuple[str, ...]
    """The newest version of each."""
    package: str | None = None
    """The module they need beyond the core, if any."""
    extra: str | None = None
    note: str = ""

    @property
    def installed(self) -> bool:
        return self.package is None or is_installed(self.package)

    @property
    def install(self) -> str:
        return f'pip install "paceline[{self.extra}]"' if self.extra else ""


def is_installed(package: str) -> bool:
    """Whether it could be imported, without importing it. A mere folder of that name does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def families() -> list[Family]:
    register_probes()
    rows = (
        ("Classic control", "gymnasium.envs.classic_control", None, None, ""),
        ("Toy text", "gymnasium.envs.toy_text", None, None, ""),
        ("Box2D", "gymnasium.envs.box2d", "Box2D", "box2d", ""),
        ("MuJoCo", "gymnasium.envs.mujoco", "mujoco", "mujoco", ""),
        ("Atari", "ale_py", "ale_py", "atari", "about a hundred games, ALE/Pong-v5 and the like"),
        ("Procgen", "envpool", "envpool", "procgen", "also procgen-coinrun-v0 and the like"),
        ("Probes", "paceline.env.probe", None, None, "tiny envs with known answers"),
    )
    return [Family(name, module, _ids(module), package, extra, note) for name, module, package, extra, note in rows]


def render(families: Iterable[Family]) -> str:
    blocks = []
    for family in families:
        state = "installed" if family.installed else f"not installed: {family.install}"
        lines = [f"{family.name}: {state}" + (f" ({family.note})" if family.note else "")]
        lines += textwrap.wrap(
            "  ".join(family.ids), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def missing_package_hint(id: str) -> str | None:
    """One line on what to install, for an id that is known but whose package is missing; else None."""
    spec = gymnasium.registry.get(id)
    for family in families():
        if family.installed:
            continue
        if spec is not None:
            known = _origin(spec).startswith(family.module)
        elif family.extra == "procgen":
            known = game_of(id) is not None
        elif family.extra == "atari":
            known = id.startswith("ALE/") or _OLD_ATARI.fullmatch(id) is not None
        else:
            known = id in {_key(other) for other in family.ids}  # a name without its version means the newest
        if known:
            return f"{id} needs the package {family.package}, which is not installed: {family.install}"
    return None


def nearest(id: str) -> list[str]:
    """The closest known ids, best first, at most three. The same name in another version, namespace or case is taken
    for the one that was meant."""
    known = [env_id for family in families() for env_id in family.ids]
    known += _newest(env_id for env_id, spec in gymnasium.registry.items() if not _origin(spec).startswith("gymnasium"))
    known = list(dict.fromkeys(known))
    wanted = _name(bare_name(id))
    same = [other for other in known if _name(other) == wanted]
    if same:
        return sorted(same, key=lambda other: (_key(other).lower() != _key(id).lower(), other))[:3]
    ratio = {other: difflib.SequenceMatcher(None, wanted, _name(other)).ratio() for other in known}
    return sorted((other for other in known if ratio[other] >= _CLOSE), key=lambda other: (-ratio[other], other))[:3]


def _ids(module: str) -> tuple[str, ...]:
    if module == "envpool":
        return GAMES
    ids = [env_id for env_id, spec in gymnasium.registry.items() if _origin(spec).startswith(module)]
    if module == "ale_py":  # the ids without a namespace are the old spellings of the same games
        ids = [env_id for env_id in ids if env_id.startswith("ALE/")] or _atari_ids()
    return tuple(sorted(_newest(ids)))


def _atari_ids() -> list[str]:
    """The ids that importing ale-py would register, from the names of the game files it ships."""
    spec = importlib.util.find_spec("ale_py")
    if spec is None or spec.origin is None:
        return []
    games = {file.stem for file in Path(spec.origin).with_name("roms").glob("*.bin")} - _ATARI_MULTIPLAYER
    return [f"ALE/{game.title().replace('_', '')}-v5" for game in games]


def _origin(spec: EnvSpec) -> str:
    """Where the env comes from, also when it is registered as a function or as a vector env only."""
    entry = spec.entry_point or spec.vector_entry_point
    return entry if isinstance(entry, str) else str(getattr(entry, "__module__", ""))


def _newest(ids: Iterable[str]) -> list[str]:
    newest: dict[str, str] = {}
    for env_id in ids:
        if _key(env_id) not in newest or _version(env_id) > _version(newest[_key(env_id)]):
            newest[_key(env_id)] = env_id
    return list(newest.values())


def _part(id: str, group: str) -> str:
    match = _ID.fullmatch(id)
    return (match[group] or "") if match else ""


def _name(id: str) -> str:
    return _part(id, "name").lower()


def _version(id: str) -> int:
    return int(_part(id, "version") or -1)


def _key(id: str) -> str:
    """The id without its version."""
    return re.sub(r"-v\d+$", "", id)
