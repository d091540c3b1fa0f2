"""The known families of environments, which of them are installed, and suggestions for misspelt ids."""

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

from paceline import machine
from paceline.envs.probe import register_probes
from paceline.envs.procgen import GAMES, bare_name, game_of

_VERSION = re.compile(r"-v(\d+)\Z")
_OLD_ATARI = re.compile(r"\w+(?:NoFrameskip|Deterministic|-ram\w*)-v\d")
# These ROMs are for several players only; ALE registers no env for them.
_ATARI_MULTIPLAYER = {"combat", "joust", "maze_craze", "warlords"}
_CLOSE = 0.65
# Ids of other packages that register them when imported: pattern, module, package.
_PLUGINS = (
    (re.compile(r"(MiniGrid|BabyAI)-"), "minigrid", "minigrid"),
    (re.compile(r"Fetch|Hand(Reach|Manipulate)|AntMaze|PointMaze|Adroit|FrankaKitchen"), "gymnasium_robotics", ""),
    (re.compile(r"(highway|merge|roundabout|parking|intersection|racetrack)-"), "highway_env", ""),
    (re.compile(r"dm_control/"), "shimmy", "shimmy[dm-control]"),
    (re.compile(r"mobile-(small|medium|large)-"), "mobile_env", "mobile-env"),
)


@dataclass(frozen=True)
class EnvFamily:
    name: str
    module: str
    """Prefix of their entry points."""
    ids: tuple[str, ...]
    """The newest version of each env."""
    package: str | None = None
    """The extra module they need, if any."""
    extra: str | None = None
    note: str = ""

    @property
    def installed(self) -> bool:
        return self.package is None or is_installed(self.package)

    @property
    def missing_libraries(self) -> list[str]:
        """System libraries that the package needs and that are missing."""
        return machine.missing_libraries(machine.ENVPOOL_LIBRARIES) if self.package == "envpool" else []

    @property
    def install(self) -> str:
        return f'pip install "paceline[{self.extra}]"' if self.extra else ""


def is_installed(package: str) -> bool:
    """Whether it can be imported, without importing it. A plain folder of that name does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def families() -> list[EnvFamily]:
    register_probes()
    rows = (
        ("Classic control", "gymnasium.envs.classic_control", None, None, ""),
        ("Toy text", "gymnasium.envs.toy_text", None, None, ""),
        ("Box2D", "gymnasium.envs.box2d", "Box2D", "box2d", ""),
        ("MuJoCo", "gymnasium.envs.mujoco", "mujoco", "mujoco", ""),
        ("Atari", "ale_py", "ale_py", "atari", "about a hundred games, such as ALE/Pong-v5"),
        ("Procgen", "envpool", "envpool", "procgen", "such as procgen-coinrun-v0"),
        ("Probes", "paceline.envs.probe", None, None, "tiny envs with known answers"),
    )
    return [EnvFamily(name, module, _ids(module), package, extra, note) for name, module, package, extra, note in rows]


def render(families: Iterable[EnvFamily]) -> str:
    blocks = []
    for family in families:
        state = "installed" if family.installed else f"not installed: {family.install}"
        lines = [f"{family.name}: {state}" + (f" ({family.note})" if family.note else "")]
        if family.installed and (missing := family.missing_libraries):
            lines += [f"  needs {', '.join(missing)}: {machine.ENVPOOL_LIBRARIES_FIX.partition(',')[0]}"]
        lines += textwrap.wrap(
            "  ".join(family.ids), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def missing_package_hint(id: str) -> str | None:
    """What to install, in one line, for a known id whose package is missing; else None."""
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
            known = id in {_key(other) for other in family.ids}  # an id without a version means the newest
        if known:
            return f"{id} needs the package {family.package}, which is not installed: {family.install}"
    return None


def plugin_hint(id: str) -> str | None:
    """How to name an env that another package registers when it is imported, if it is known."""
    for pattern, module, package in _PLUGINS:
        if pattern.match(id):
            if is_installed(module):
                return f"did you mean {module}:{id}? The part before the colon is imported, which registers it"
            return f"pip install {package or module.replace('_', '-')}, then name it {module}:{id}"
    return None


def nearest(id: str) -> list[str]:
    """At most three known ids closest to `id`, best first. Ids that differ only in version, namespace or case win."""
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
    if module == "ale_py":  # ids without a namespace are old spellings of the same games
        ids = [env_id for env_id in ids if env_id.startswith("ALE/")] or _atari_ids()
    return tuple(sorted(_newest(ids)))


def _atari_ids() -> list[str]:
    """The ids that ale-py registers when imported, from the names of the ROM files it ships."""
    spec = importlib.util.find_spec("ale_py")
    if spec is None or spec.origin is None:
        return []
    games = {file.stem for file in Path(spec.origin).with_name("roms").glob("*.bin")} - _ATARI_MULTIPLAYER
    return [f"ALE/{game.title().replace('_', '')}-v5" for game in games]


def _origin(spec: EnvSpec) -> str:
    """The module of the env, also when it is registered as a function or as a vector env only."""
    entry = spec.entry_point or spec.vector_entry_point
    return entry if isinstance(entry, str) else str(getattr(entry, "__module__", ""))


def _newest(ids: Iterable[str]) -> list[str]:
    newest: dict[str, str] = {}
    for env_id in ids:
        if _key(env_id) not in newest or _version(env_id) > _version(newest[_key(env_id)]):
            newest[_key(env_id)] = env_id
    return list(newest.values())


def _name(id: str) -> str:
    """Without namespace and version, in lower case."""
    return _key(id).rpartition("/")[2].lower()


def _version(id: str) -> int:
    match = _VERSION.search(id)
    return int(match[1]) if match else -1


def _key(id: str) -> str:
    """The id without its version."""
    return _VERSION.sub("", id)
