"""An environment by name: a Gymnasium id, a Procgen game, `package.module:Name`, `path/to/file.py:ClassName`, or the
name of an object."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Unpack

import gymnasium
from gymnasium.vector import AutoresetMode

from paceline import machine
from paceline.config import EnvConfig, UserError
from paceline.config.objects import has_object, load_object
from paceline.config.plugins import import_module, load_attribute
from paceline.envs import atari, catalog, procgen
from paceline.envs.agents_vector import sync_vector
from paceline.envs.async_vector import AsyncVector
from paceline.envs.contract import check_kind, check_made, close_env
from paceline.envs.multi_agent import AgentsEnv, has_agents
from paceline.envs.native_vector import NativeVector
from paceline.envs.pool import Pool, PoolEnv, PoolVector
from paceline.envs.probe import register_probes
from paceline.envs.rllib_style import EnvContext, takes_env_config
from paceline.envs.sync_vector import SyncVector
from paceline.envs.vector import Env, VectorEnv, VectorOptions


def make_scalar(config: EnvConfig, *, render_mode: str | None = None, place: tuple[int, int] = (0, 0)) -> Env:
    """One environment of one agent with its wrappers. `place`: its worker and its number there, for RLlib-style
    envs."""
    env = make_env(config, render_mode=render_mode, place=place)
    if isinstance(env, AgentsEnv):
        close_env(env)
        raise UserError(f"env.id={config.id} has several agents ({len(env.agents)}), and one is expected here")
    return env


def make_env(config: EnvConfig, *, render_mode: str | None = None, place: tuple[int, int] = (0, 0)) -> Env | AgentsEnv:
    """The same for an environment of one or of several agents."""
    try:
        env, several = _build(config, render_mode, place)
        for item in config.wrappers:
            name, arguments = (item, {}) if isinstance(item, str) else next(iter(item.items()))
            if several and ":" not in name:
                raise UserError(
                    f"env.wrappers={name} is for envs of one agent, but {config.id} has several: give a wrapper that "
                    "takes such an env, as module:Class or file.py:Class"
                )
            env = _find_wrapper(name)(env, **arguments)
        if several:
            return _with_agents(env, config)
        if config.frame_stack > 1:
            env = gymnasium.wrappers.FrameStackObservation(env, config.frame_stack)
        check_made(env, config.id)
    except UserError:
        raise
    except Exception as error:  # a user's constructor may raise anything, and counts as input
        reason = " ".join(str(error).split()) or "no reason given"
        raise UserError(f"env.id={config.id} could not be made: {type(error).__name__}: {reason}") from error
    return env


def make_vector(
    config: EnvConfig, num_envs: int, *, cores: int = 0, in_worker: bool = False, **options: Unpack[VectorOptions]
) -> tuple[VectorEnv, str]:
    """N environments as one, and a description of how they are stepped.

    `cores`: how many to use, 0 for all that this process may use. `in_worker`: this process is one of several. The
    other options are those of `VectorEnv`.
    """
    vector, how = _make_vector(config, num_envs, cores, in_worker, options)
    if config.restart_on_error and not isinstance(vector, SyncVector | AsyncVector):
        vector.close()
        raise UserError(
            f"env.restart_on_error={config.restart_on_error}: {config.id} has its own vector env, whose environments "
            "cannot be started again one by one; set env.vector=sync or async, or leave env.restart_on_error out"
        )
    return vector, how


def _make_vector(
    config: EnvConfig, num_envs: int, cores: int, in_worker: bool, options: VectorOptions
) -> tuple[VectorEnv, str]:
    options["channels"] = config.channels
    if config.action_mask == "ignore":
        options["masked"] = False
    plain = not config.wrappers and config.frame_stack == 1
    parallel = min(config.processes or cores or machine.cores(), num_envs)
    reason = ""
    if config.vector == "auto":
        if (pool := _pool_maker(config)) is not None:
            if plain and not _needs_time_limit(config):
                how = "in 1 thread" if parallel == 1 else f"in {parallel} threads"
                how = how if atari.is_atari(config.id) else f"{procgen.describe(config)}, {how}"
                return PoolVector(pool(num_envs, threads=parallel), num_envs, **options), how
            reason = f" (its own vector env takes no {'time limit' if plain else 'wrappers'})"
        else:
            native, reason = _native(config, num_envs, allowed=plain)
            if native is not None and not config.processes:
                return NativeVector(native, **options), "its own vector env"
    worker, first = options.get("worker", 0), options.get("first_env", 0)
    makers: list[Callable[[], Any]] = [
        functools.partial(make_env, config, place=(worker, first + number)) for number in range(num_envs)
    ]
    if config.vector == "async":
        vector = AsyncVector(
            makers,
            processes=parallel,
            timeout_seconds=config.step_timeout_seconds,
            restart_on_error=config.restarts(in_worker=in_worker),
            **options,
        )
        return vector, f"in {parallel} processes"
    if config.processes:
        raise UserError(f"env.processes={config.processes} is only for env.vector=async, Procgen and Atari")
    sync = sync_vector(makers, restart_on_error=config.restarts(in_worker=in_worker), **options)
    return sync, f"in this process{reason}"


def _needs_time_limit(config: EnvConfig) -> bool:
    """Whether a wrapper must enforce `max_episode_steps`. ALE counts by itself; envpool cannot end one env of many."""
    return config.max_episode_steps is not None and not atari.is_atari(config.id)


def _pool_maker(config: EnvConfig) -> Callable[..., Pool] | None:
    """For environments that step in their own threads: `(num_envs, threads=, render=)` → `Pool`."""
    if (game := procgen.game_of(config.id)) is not None:
        if not catalog.is_installed("envpool"):
            raise UserError(f"env.id={config.id}: {catalog.missing_package_hint(config.id)}")
        return functools.partial(procgen.ProcgenPool, game, config.kwargs)
    if atari.is_atari(config.id):
        _check_known(config.id)
        return functools.partial(atari.AtariPool, atari.options_of(config.id, config.kwargs, config.max_episode_steps))
    return None


def _build(config: EnvConfig, render_mode: str | None, place: tuple[int, int]) -> tuple[Env, bool]:
    """The environment without wrappers, and whether it has several agents."""
    env_id, max_episode_steps, kwargs = config.id, config.max_episode_steps, dict(config.kwargs)
    if (pool := _pool_maker(config)) is not None:
        if render_mode == "human":
            raise UserError(f"--render: {env_id} has no window; record it with --video FILE")
        env: Env = PoolEnv(lambda render: pool(1, render=render), render_mode)
        return gymnasium.wrappers.TimeLimit(env, max_episode_steps or 0) if _needs_time_limit(config) else env, False
    if render_mode:
        kwargs["render_mode"] = render_mode
    name = _registered_name(env_id)
    found: Any = _find_class(env_id) if name is None else name
    if not isinstance(found, str | gymnasium.envs.registration.EnvSpec):
        return _from_class(found, env_id, max_episode_steps, kwargs, place)
    with _quiet_gymnasium():
        env = gymnasium.make(found, disable_env_checker=True, **_limit(config), **kwargs)
    return env, has_agents(env)


def _limit(config: EnvConfig) -> dict[str, Any]:
    return {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}


def _registered_name(env_id: str) -> str | None:
    """The id in Gymnasium's registry; None if `env_id` names a class."""
    module, sign, name = env_id.rpartition(":")
    if sign and (module.endswith(".py") or has_object(env_id)):
        return None
    if sign and not module:
        raise UserError(f"env.id={env_id}: expected module:Name or path/to/file.py:Name")
    if sign:
        import_module(module, "env.id")
        if name not in gymnasium.registry:
            return None
    _check_known(name)
    return name


def _find_class(env_id: str) -> Any:
    """A class or function. PettingZoo names its environments after modules that have a function `parallel_env`."""
    if has_object(env_id):
        return load_object(env_id, "env.id")
    path, _, name = env_id.rpartition(":")
    if not path.endswith(".py") and not hasattr(import_module(path, "env.id"), name):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"{path}.{name}")  # makes it an attribute
    found = load_attribute(env_id, "env.id")
    if isinstance(found, ModuleType):
        make = next((getattr(found, kind) for kind in ("parallel_env", "env") if hasattr(found, kind)), None)
        if make is None:
            raise UserError(f"env.id={env_id}: the module has no parallel_env; expected module:Name of a class")
        return make
    return found


def _from_class(
    cls: Any, env_id: str, max_episode_steps: int | None, kwargs: dict[str, Any], place: tuple[int, int]
) -> tuple[Env, bool]:
    if not callable(cls):
        raise UserError(f"env.id={env_id}: expected a class or function that makes a gymnasium.Env")
    env: Any = cls(EnvContext(kwargs, *place)) if takes_env_config(cls, kwargs) else cls(**kwargs)
    if has_agents(env):
        return env, True
    check_kind(env, env_id)
    return env if max_episode_steps is None else gymnasium.wrappers.TimeLimit(env, max_episode_steps), False


def _with_agents(env: Any, config: EnvConfig) -> AgentsEnv:
    if config.frame_stack > 1:
        raise UserError(
            f"env.frame_stack={config.frame_stack} is for envs of one agent, but {config.id} has several: let a "
            "wrapper of your own stack their frames"
        )
    return AgentsEnv(env, config.id, config.max_episode_steps)


def _native(config: EnvConfig, num_envs: int, *, allowed: bool) -> tuple[Any, str]:
    """The env's registered vector implementation, or why it is not used."""
    name = _registered_name(config.id)
    if name is None or gymnasium.spec(name).vector_entry_point is None:
        return None, ""
    if not allowed:
        return None, " (its own vector env takes no wrappers)"
    # One scalar env first: it reports wrong arguments in one line, and its spaces must be the same.
    one = make_scalar(config)
    spaces = one.observation_space, one.action_space
    close_env(one)
    with _quiet_gymnasium():
        env = gymnasium.make_vec(
            name, num_envs, vectorization_mode="vector_entry_point", **{**config.kwargs, **_limit(config)}
        )
    problem = ""
    if env.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
        problem = " (its own vector env resets in another way)"
    elif (env.single_observation_space, env.single_action_space) != spaces:
        problem = " (its own vector env has other spaces)"
    if not problem:
        return env, ""
    env.close()
    return None, problem


def _check_known(env_id: str) -> None:
    register_probes()
    if env_id.startswith("ALE/") and catalog.is_installed("ale_py"):
        importlib.import_module("ale_py")  # registers its games
    if env_id not in gymnasium.registry and has_object(env_id):  # registered by the process that the run is from
        gymnasium.registry[env_id] = load_object(env_id, "env.id")
    hint = catalog.missing_package_hint(env_id)
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error:
        hint = hint or catalog.plugin_hint(env_id)
        if hint is None:
            near = catalog.nearest(env_id)
            hint = f"did you mean {' or '.join(near[:3])}?" if near else "`paceline envs` lists what is installed"
        raise UserError(f"env.id={env_id}: no such environment is registered; {hint}") from None
    if hint is not None:
        raise UserError(f"env.id={env_id}: {hint}")


def _find_wrapper(name: str) -> Callable[..., Env]:
    if ":" in name:
        found: Callable[..., Env] = load_attribute(name, "env.wrappers")
        return found
    wrapper = getattr(gymnasium.wrappers, name, None)
    if wrapper is None:
        near = difflib.get_close_matches(name, [n for n in dir(gymnasium.wrappers) if n[:1].isupper()], 1)
        hint = f"did you mean {near[0]}?" if near else "use one of gymnasium.wrappers, module:Class or file.py:Class"
        raise UserError(f"env.wrappers={name}: there is no such wrapper in gymnasium.wrappers; {hint}")
    return wrapper  # type: ignore[no-any-return]


@contextlib.contextmanager
def _quiet_gymnasium() -> Iterator[None]:
    """Gymnasium's advice on newer versions and unusual spaces belongs in `envs check`, not in every run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="gymnasium")
        yield
