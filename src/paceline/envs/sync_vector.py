"""Scalar environments as a vector environment, in this process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np

from paceline.config import UserError
from paceline.envs.contract import check_reset, check_step, close_env, read_metrics, reset_env, set_attribute
from paceline.envs.env_state import env_state, set_env_state
from paceline.envs.masks import INFO, MaskReader, find_masks, offered
from paceline.envs.multi_agent import spaces_of
from paceline.envs.restarts import FRESH_STEPS, Restarts
from paceline.envs.vector import Env, State, StepResult, VectorEnv, VectorOptions, seed_from
from paceline.spaces import MASK, Array

RESTARTABLE = (Exception, SystemExit)  # some simulators end the process where they should raise an error
MAX_REPLAY_STEPS = 20_000  # longer episodes restart instead of being replayed


class SyncVector(VectorEnv):
    """Scalar environments, stepped one after the other in this process."""

    def __init__(
        self,
        makers: Sequence[Callable[[], Env]],
        *,
        restart_on_error: int = 0,
        first_episode: int = 0,
        first: Any = None,
        on_made: Callable[[], None] = lambda: None,
        **options: Unpack[VectorOptions],
    ) -> None:
        """`restart_on_error`: see `EnvConfig`. `first_episode`: the number of each environment's first episode.
        `first`: the first environment, if it is made already. `on_made`: called when all environments are made, before
        one is reset."""
        self._makers = makers
        self._attributes: dict[str, Any] = {}
        self.envs = [first or makers[0](), *(make() for make in makers[1:])]
        on_made()
        self._episode = [first_episode - 1] * len(makers)
        self._ahead: tuple[int, Any] | None = None  # a seed, and what the first environment's reset with it returned
        super().__init__(len(self.envs), **spaces_of(self.envs[0], options), **options)
        self._done = [True] * self.num_envs
        self._actions: list[list[Any]] = [[] for _ in self.envs]  # of the running episode, for `restore`
        self.on_replay: Callable[[], None] = lambda: None  # called after each replayed step: a replay can take long
        self._checked = False  # whether the first step followed the rules
        self._restarts = Restarts(self.num_envs, restart_on_error)
        self._fresh_episode = [-1] * self.num_envs  # the first one after a fresh start
        self._was_reset = False

    def _find_masks(self, masked: bool | None) -> MaskReader | None:
        env, info = self.envs[0], {MASK: None} if masked else {}
        if not masked and not offered(env) and self.action.nvec:
            seed = self._seed_of(0, self._episode[0] + 1)
            with contextlib.suppress(*RESTARTABLE):  # the reset at the start reports it
                self._ahead = seed, reset_env(env, seed)
                info = self._ahead[1][1]
        return find_masks(env, self.action, info)

    def reset(self) -> Array:
        for index in range(self.num_envs):
            try:
                self._begin(index)
            except RESTARTABLE as error:
                if not self._was_reset:  # it has never worked
                    raise
                self._fail(index, error)
        self._was_reset = True
        self._check_masks()
        return self._obs

    def step(self, action: Array) -> StepResult:
        encode, obs, done, checked = self.observation.encode_one, self._obs, self._done, self._checked
        masks = self.masks
        for index, (env, act) in enumerate(zip(self.envs, self.action.split(action), strict=True)):
            try:
                if done[index]:
                    self._begin(index)
                    self._blank(index)
                    continue
                result = env.step(act)
            except RESTARTABLE as error:
                self._fail(index, error)
                continue
            if not checked:  # numpy would repeat an observation that is too small, and take None for a number
                check_step(result, self.observation.space)
                self._refuse_late_mask(result[4])
            try:
                observation, reward, terminated, truncated, info = result
                encode(observation, obs[index])
                self._reward[index] = reward
                self._terminated[index], self._truncated[index] = terminated, truncated
            except (TypeError, ValueError, LookupError):
                check_step(result, self.observation.space)  # says what is wrong
                raise
            if len(self._actions[index]) <= MAX_REPLAY_STEPS:  # one more than the limit shows that it was exceeded
                self._actions[index].append(act)
            if masks is not None:
                self._write_mask(index, observation, info, terminated)
            if terminated or truncated:
                done[index] = True
                if "metrics" in info:
                    self.finished_metrics.append((index, read_metrics(info["metrics"])))
        self._checked = True
        if masks is not None:
            self._check_masks()
        return self._obs, self._reward, self._terminated, self._truncated

    def set_attribute(self, name: str, value: Any) -> None:
        self._attributes[name] = value
        for env in self.envs:
            set_attribute(env, name, value)

    def _make(self, index: int) -> Env:
        """A fresh environment, as the others are by now."""
        env = self._makers[index]()
        for name, value in self._attributes.items():
            set_attribute(env, name, value)
        return env

    def _rows(self, index: int) -> slice:
        """Of one environment."""
        return slice(index, index + 1)

    def _blank(self, index: int) -> None:
        """The results of a step that only resets."""
        rows = self._rows(index)
        self._reward[rows] = 0.0
        self._terminated[rows] = self._truncated[rows] = False

    def _write_mask(self, index: int, observation: Any, info: Any, terminated: Any = False) -> None:
        """Store the mask of a state. After the end of an episode no action is taken, and it may allow none."""
        assert self.masks is not None
        when = functools.partial(self._when, index)
        mask = 1 if terminated else self.masks.read(self.envs[index], observation, info, when)
        self._obs[index, self.observation.mask_columns] = mask

    def _check_masks(self) -> None:
        if self.masks is not None:
            self.masks.check(self._obs[:, self.observation.mask_columns], self._when)

    def _when(self, index: int) -> str:
        steps = len(self._actions[index])
        return f"at step {steps} of an episode" if steps else "at the start of an episode"

    def _refuse_late_mask(self, info: Any) -> None:
        if self._may_mask and find_masks(self.envs[0], self.action, info) is not None:
            raise UserError(f"{INFO} is not there from the first reset on: give it with every reset and step")

    def _fail(self, index: int, error: BaseException) -> None:
        """Start an environment that raised `error` again; this step becomes one that only resets."""
        if not self._restarts.limit or isinstance(error, UserError):
            raise error
        self._blank(index)
        self._done[index] = True
        self.failed.append(index)
        fresh = self._episode[index] == self._fresh_episode[index] and len(self._actions[index]) < FRESH_STEPS
        self._restarts.fail(index, error, fresh=fresh)
        self._restart(index)

    def _restart(self, index: int) -> None:
        """Make a failed environment anew, unless it must wait."""
        if not self._restarts.is_due(index):
            return
        try:
            with contextlib.suppress(*RESTARTABLE):
                self.envs[index].close()
            self.envs[index] = self._make(index)
            self._restarts.started(index)
            self._fresh_episode[index] = self._episode[index] + 1
            self._begin(index)
            self.env_restarts += 1
        except RESTARTABLE as error:
            self._restarts.fail(index, error, fresh=True)

    def _begin(self, index: int) -> None:
        if index in self._restarts.down:
            self.failed.append(index)
            self._restart(index)
            return
        self._episode[index] += 1
        seed, ahead, self._ahead = self._seed_of(index, self._episode[index]), self._ahead, None
        result = ahead[1] if ahead is not None and ahead[0] == seed else reset_env(self.envs[index], seed)
        self._encode_first(index, result)
        self._done[index] = False
        self._actions[index] = []
        if self.masks is not None:
            self._write_first_masks(index, result)

    def _write_first_masks(self, index: int, result: Any) -> None:
        self._write_mask(index, *result)

    def _encode_first(self, index: int, result: Any) -> None:
        if self._episode[index] == 0 or not isinstance(result, tuple):
            check_reset(result, self.observation.space)
            self._refuse_late_mask(result[1])
        self.observation.encode_one(result[0], self._obs[index])

    def _seed_of(self, index: int, episode: int) -> int:
        return seed_from((*self._entropy, self._first_env + index, episode))

    def reseed(self, seed: int, worker: int, resumes: int) -> None:
        super().reseed(seed, worker, resumes)
        self._episode = [-1] * self.num_envs

    def state(self) -> State | None:
        if self._restarts.down:
            return None
        saved = [env_state(env) for env in self.envs]
        own = all(state is not None for state in saved)
        if not own and max(len(actions) for actions in self._actions) > MAX_REPLAY_STEPS:
            return None
        return {
            "entropy": list(self._entropy),
            "episode": list(self._episode),
            "done": list(self._done),
            "terminated": self._terminated.copy(),
            "truncated": self._truncated.copy(),
            "own": saved if own else None,
            "actions": None if own else [self._as_saved(actions) for actions in self._actions],
        }

    def restore(self, state: State, observation: Array) -> bool:
        before = self._entropy
        self._entropy = tuple(int(part) for part in state["entropy"])
        self._episode = [int(part) for part in state["episode"]]
        if state["own"] is not None:
            for env, saved in zip(self.envs, state["own"], strict=True):
                env.reset()
                set_env_state(env, saved)
            self._obs[...] = observation
        else:
            try:
                for index, actions in enumerate(state["actions"]):
                    self._replay(index, actions, self._restarts.limit)
            except Exception:  # an environment that diverged may refuse the next action in any way
                same = False
            else:
                same = np.array_equal(self._obs, observation)
            if not same:
                self.reseed(*before)
                return False
        self._done = [bool(flag) for flag in state["done"]]
        self._terminated[...], self._truncated[...] = state["terminated"], state["truncated"]
        return True

    def _replay(self, index: int, actions: Array, tries: int) -> None:
        self._episode[index] -= 1
        try:
            self._begin(index)
            for act in self._from_saved(actions):
                self._replay_step(index, act)
                self._actions[index].append(act)
                self.on_replay()
        except RESTARTABLE:
            if not tries:
                raise
            self.envs[index] = self._make(index)
            self._replay(index, actions, tries - 1)

    def _replay_step(self, index: int, act: Any) -> None:
        result, _, terminated, _, info = self.envs[index].step(act)
        self.observation.encode_one(result, self._obs[index])
        if self.masks is not None:
            self._write_mask(index, result, info, terminated)

    def _as_saved(self, actions: list[Any]) -> Array:
        packed: Array = self.action.pack(actions)
        return packed

    def _from_saved(self, packed: Array) -> list[Any]:
        actions: list[Any] = self.action.unpack(packed)
        return actions

    def close(self) -> None:
        for env in self.envs:
            close_env(env)
