"""An id → an environment: a Gymnasium id, a Procgen game, `package.module:EnvId`, or `path/to/file.py:ClassName`."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from paceline import machine
from paceline.config import EnvConfig, UserError
from paceline.env import atari, catalog, procgen
from paceline.env.async_vector import AsyncVector
from paceline.env.pool import Pool, PoolEnv, PoolVector
from paceline.env.probe import register_probes
from paceline.env.vector import NativeVector, SyncVector, VectorEnv
from paceline.plugins import import_module, load_attribute

Env = gymnasium.Env[Any, Any]


def make_scalar(config: EnvConfig, *, render_mode: str | None = None) -> Env:
    """One environment with its wrappers."""
    try:
        env = _build(config, render_mode)
        for name, arguments in _wrappers(config):
            env = _find_wrapper(name)(env, **arguments)
        if config.frame_stack > 1:
            env = gymnasium.wrappers.FrameStackObservation(env, config.frame_stack)
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(env, name, None), gymnasium.Space):
                raise UserError(f"env.id={config.id}: it has no {name} (a gymnasium.Space); set it in __init__")
    except UserError:
        raise
    except Exception as error:  # the user's constructor may raise anything; it is their input
        reason = " ".join(str(error).split()) or "no reason given"
        raise UserError(f"env.id={config.id} could not be made: {type(error).__name__}: {reason}") from error
    return env


def make_vector(
    config: EnvConfig,
    num_envs: int,
    *,
    seed: int,
    worker: int = 0,
    resumes: int = 0,
    first_env: int = 0,
    cores: int = 0,
    squash: bool = False,
) -> tuple[VectorEnv, str]:
    """N environments as one, and a few words on how they are stepped.

    `first_env`: how many environments of this worker there are in other vectors; `cores`: those to use, 0 for all ours.
    """
    options: dict[str, Any] = {"seed": seed, "worker": worker, "resumes": resumes, "first_env": first_env}
    options["squash"] = squash
    plain = not config.wrappers and config.frame_stack == 1
    parallel = min(config.processes or cores or machine.cores(), num_envs)
    reason = ""
    if config.vector == "auto":
        if (pool := _pool_maker(config)) is not None:
            if plain and not _limited(config):
                how = "in 1 thread of their own" if parallel == 1 else f"in {parallel} threads of their own"
                how = how if atari.is_atari(config.id) else f"{procgen.describe(config)}, {how}"
                return PoolVector(pool(num_envs, threads=parallel), num_envs, **options), how
            reason = f" (its own vector env takes no {'time limit' if plain else 'wrappers'})"
        else:
            native, reason = _native(config, num_envs, allowed=plain)
            if native is not None and not config.processes:
                return NativeVector(native, **options), "its own vector env"
    makers: list[Callable[[], Env]] = [functools.partial(make_scalar, config)] * num_envs
    if config.vector == "async":
        vector = AsyncVector(makers, processes=parallel, timeout_seconds=config.step_timeout_seconds, **options)
        return vector, f"in {parallel} processes"
    if config.processes:
        raise UserError(f"env.processes={config.processes} is for env.vector=async, and for Procgen and Atari")
    return SyncVector(makers, **options), f"in this process{reason}"


def _limited(config: EnvConfig) -> bool:
    """Whether a time limit has to be put around the env. ALE counts by itself; envpool can't end one env of many."""
    return config.max_episode_steps is not None and not atari.is_atari(config.id)


def _pool_maker(config: EnvConfig) -> Callable[..., Pool] | None:
    """For environments that step in threads of their own: `(num_envs, threads=, render=)` → a pool of them."""
    if (game := procgen.game_of(config.id)) is not None:
        if not catalog.is_installed("envpool"):
            raise UserError(f"env.id={config.id}: {catalog.missing_package_hint(config.id)}")
        return functools.partial(procgen.ProcgenPool, game, config.kwargs)
    if atari.is_atari(config.id):
        _check_known(config.id)
        return functools.partial(atari.AtariPool, atari.options_of(config.id, config.kwargs, config.max_episode_steps))
    return None


def _build(config: EnvConfig, render_mode: str | None) -> Env:
    env_id, max_episode_steps, kwargs = config.id, config.max_episode_steps, dict(config.kwargs)
    if (pool := _pool_maker(config)) is not None:
        if render_mode == "human":
            raise UserError(f"--render: {env_id} has no window; film it with --video FILE")
        env: Env = PoolEnv(lambda render: pool(1, render=render), render_mode)
        return gymnasium.wrappers.TimeLimit(env, max_episode_steps or 0) if _limited(config) else env
    if render_mode:
        kwargs["render_mode"] = render_mode
    name = _registered_name(env_id)
    if name is None:
        return _from_class(load_attribute(env_id, "env.id"), env_id, max_episode_steps, kwargs)
    options: dict[str, Any] = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
    with _quiet_gymnasium():
        return gymnasium.make(name, disable_env_checker=True, **options, **kwargs)


def _registered_name(env_id: str) -> str | None:
    """The id in Gymnasium's registry; None if a class is meant."""
    module, sign, name = env_id.rpartition(":")
    if sign and module.endswith(".py"):
        return None
    if sign and not module:
        raise UserError(f"env.id={env_id}: module:Name or path/to/file.py:Name is expected")
    if sign:
        import_module(module, "env.id")
        if name not in gymnasium.registry:
            return None
    _check_known(name)
    return name


def _from_class(cls: Any, env_id: str, max_episode_steps: int | None, kwargs: dict[str, Any]) -> Env:
    if not callable(cls):
        raise UserError(f"env.id={env_id}: this is not a class or function that makes a gymnasium.Env")
    env: Any = cls(**kwargs)
    if not isinstance(env, gymnasium.Env):
        raise UserError(f"env.id={env_id}: makes a {type(env).__name__}, a gymnasium.Env is expected")
    if max_episode_steps is not None:
        return gymnasium.wrappers.TimeLimit(env, max_episode_steps)
    return env


def _native(config: EnvConfig, num_envs: int, *, allowed: bool) -> tuple[Any, str]:
    """The env's registered vector implementation, or why it is not used."""
    name = _registered_name(config.id)
    if name is None or gymnasium.spec(name).vector_entry_point is None:
        return None, ""
    if not allowed:
        return None, " (its own vector env takes no wrappers)"
    # One scalar env first: if the arguments are wrong it says so in one line, and its spaces have to be the same.
    one = make_scalar(config)
    spaces = one.observation_space, one.action_space
    one.close()  # type: ignore[no-untyped-call]
    options = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    with _quiet_gymnasium():
        env = gymnasium.make_vec(
            name, num_envs, vectorization_mode="vector_entry_point", **{**config.kwargs, **options}
        )
    if env.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
        env.close()
        return None, " (its own vector env resets in another way)"
    if (env.single_observation_space, env.single_action_space) != spaces:
        env.close()
        return None, " (its own vector env has other spaces)"
    return env, ""


def _check_known(env_id: str) -> None:
    register_probes()
    if env_id.startswith("ALE/") and catalog.is_installed("ale_py"):
        importlib.import_module("ale_py")  # registers its games
    try:
        gymnasium.spec(env_id)
    except gymnasium.error.Error:
        hint = catalog.missing_package_hint(env_id)
        near = catalog.nearest(env_id)
        if hint is None:
            hint = f"did you mean {' or '.join(near[:3])}?" if near else "`paceline envs` lists what is installed"
        raise UserError(f"env.id={env_id}: no such environment is registered; {hint}") from None
    hint = catalog.missing_package_hint(env_id)
    if hint is not None:
        raise UserError(f"env.id={env_id}: {hint}")


def _wrappers(config: EnvConfig) -> list[tuple[str, dict[str, Any]]]:
    return [
        (item, {}) if isinstance(item, str) else next(iter((name, dict(args)) for name, args in item.items()))
        for item in config.wrappers
    ]


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
def _quiet_gymnasium() -> Any:
    """Gymnasium's advice on newer versions and unusual spaces is for `envs check`, not for every run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="gymnasium")
        yield
