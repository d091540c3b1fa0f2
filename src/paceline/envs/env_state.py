"""Saving and restoring environments that can do it: those with `get_state` and `set_state`, and some of Gymnasium."""

from __future__ import annotations

from typing import Any

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from paceline.envs.contract import layers


def is_vector_cartpole(env: Any) -> bool:
    return type(env).__name__ == "CartPoleVectorEnv" and all(hasattr(env, a) for a in ("state", "steps", "prev_done"))


def can_save(env: Any) -> bool:
    return hasattr(env, "get_state") and hasattr(env, "set_state")


def env_state(env: Any) -> dict[str, Any] | None:
    """The state of an environment with `get_state` and `set_state`; None under a wrapper with unknown state."""
    *wrappers, base = layers(env)
    if not can_save(base) or not all(isinstance(w, TimeLimit | OrderEnforcing | PassiveEnvChecker) for w in wrappers):
        return None
    elapsed = [wrapper._elapsed_steps for wrapper in wrappers if isinstance(wrapper, TimeLimit)]
    return {"elapsed": elapsed[-1] if elapsed else None, "env": base.get_state()}


def set_env_state(env: Any, saved: dict[str, Any]) -> None:
    *wrappers, base = layers(env)
    for wrapper in wrappers:
        if isinstance(wrapper, TimeLimit):
            wrapper._elapsed_steps = saved["elapsed"]
    base.set_state(saved["env"])
