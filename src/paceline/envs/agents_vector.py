"""Environments of several agents as a vector environment: each agent of each environment is a row.

An agent that is not there, because it died, left or has not come yet, has a row with `valid=False`. An environment
resets when all of its agents are done. Rows are in the order of the environments, then of the agents.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from paceline.config import UserError
from paceline.envs.contract import check_observation, read_metrics, reset_env
from paceline.envs.masks import INFO, KEY, MaskReader
from paceline.envs.multi_agent import ALL, AgentsEnv, check_agents_step, check_names
from paceline.envs.sync_vector import MAX_REPLAY_STEPS, RESTARTABLE, SyncVector
from paceline.envs.vector import StepResult, VectorOptions
from paceline.spaces import MASK, Array

MAX_EMPTY_STEPS = 10_000
"""Steps in a row without any agent: an environment that never ends."""


class AgentsVector(SyncVector):
    """Steps the environments one after the other in this process."""

    envs: list[Any]

    def __init__(self, makers: Sequence[Callable[[], Any]], **options: Any) -> None:
        """See `SyncVector`."""
        self._width = 1
        super().__init__(makers, **options)
        count, self._width = self.num_envs, len(self.agents)
        self._number = {name: number for number, name in enumerate(self.agents)}
        self._here: list[list[int]] = [[] for _ in range(count)]  # numbers of the agents that are there
        self._all_here = list(range(self._width))
        self._gone: list[list[int]] = [[] for _ in range(count)]  # those that ended in the last step
        self._left: list[set[int]] = [set() for _ in range(count)]  # those that left this episode without a flag
        self._empty = [0] * count  # steps in a row without any agent
        self._split = self.action.split if self.team is None else self.team.split
        self._presence: NDArray[np.bool_] = np.zeros((count, self._width), np.bool_)

    def _rows(self, index: int) -> slice:
        return slice(index * self._width, (index + 1) * self._width)

    def step(self, action: Array) -> StepResult:
        acts = self._split(action)
        width = self._width
        for index in range(self.num_envs):
            rows = self._rows(index)
            try:
                if self._done[index]:
                    self._begin(index)
                    self._blank(index)
                    continue
                self._advance(index, acts[rows])
            except RESTARTABLE as error:
                self._fail(index, error)
                continue
            if len(self._actions[index]) <= MAX_REPLAY_STEPS:
                self._actions[index].append(action[index * width : (index + 1) * width].copy())
        self._checked = True
        self._check_masks()
        return self._obs, self._reward, self._terminated, self._truncated

    def _blank(self, index: int) -> None:
        """The results of a step that only resets."""
        super()._blank(index)
        assert self.valid is not None and self.stepped is not None and self.over is not None
        self.valid[self._rows(index)] = False
        self.stepped[index] = self.over[index] = False

    def _find_masks(self, masked: bool | None) -> MaskReader | None:
        """In Dict observations, or in the info of each agent."""
        space = self.envs[0].observation_space
        if isinstance(space, spaces.Dict) and MASK in space.spaces:
            return MaskReader(KEY, self.action.nvec)
        if not self.action.nvec:
            return None
        infos: Any = {}
        if not masked:
            seed = self._seed_of(0, self._episode[0] + 1)
            with contextlib.suppress(*RESTARTABLE):  # the reset at the start reports it
                self._ahead = seed, reset_env(self.envs[0], seed)
                infos = self._ahead[1][1]
        return MaskReader(INFO, self.action.nvec) if masked or _has_masks(infos) else None

    def _write_first_masks(self, index: int, result: Any) -> None:
        return  # `_encode_first` has

    def _refuse_late_masks(self, infos: Any) -> None:
        """Masks in infos that come too late, or that go to several policies."""
        if self._may_mask and _has_masks(infos) and (self.team is not None or self.action.nvec):
            what = "several policies need masks in a Dict observation" if self.team else "give it from reset on, too"
            raise UserError(f"{INFO} of an agent: {what}, or set env.action_mask=ignore")

    def _when(self, index: int) -> str:
        """`index`: of a row."""
        return f"agent {self.agents[index % self._width]}, {super()._when(index // self._width)}"

    def _encode_first(self, index: int, result: Any) -> None:
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Mapping)):
            raise UserError(
                "the env's reset must return two dictionaries by agent (observations, infos), not "
                f"{type(result).__name__}"
            )
        observations = result[0]
        if not observations:
            raise UserError("the env's reset returned no observation: at least one agent must be there")
        if self._episode[index] == 0:
            self._check_observations(index, observations, "reset")
            self._refuse_late_masks(result[1])
        self._gone[index], self._empty[index] = [], 0
        self._left[index].clear()
        for number in range(self._width):
            self._clear_row(index, number)
        here = sorted(self._number[name] for name in observations)
        self._actions[index] = []
        for number in here:
            self._encode(index, number, observations[self.agents[number]], result[1])
        self._set_present(index, here)

    def _set_present(self, index: int, here: list[int]) -> None:
        self._here[index] = self._all_here if len(here) == self._width else here
        self._presence[index] = False
        self._presence[index, here] = True

    def _encode(self, index: int, number: int, observation: Any, infos: Any, terminated: bool = False) -> None:
        """Store the observation of an agent, and its mask. After a termination a mask may allow nothing."""
        row = self._obs[index * self._width + number]
        if self.team is None:
            self.observation.encode_one(observation, row)
            if self.masks is not None:
                row[self.observation.mask_columns] = self._mask(
                    self.masks, index, number, observation, infos, terminated
                )
            return
        part = self.team.of_agent[number]
        codec = part.observation
        encoded = np.zeros(codec.shape, codec.dtype)
        codec.encode_one(observation, encoded)
        if codec.mask:
            masks = MaskReader(KEY, codec.mask)
            encoded[codec.mask_columns] = self._mask(masks, index, number, observation, infos, terminated)
            masks.check(encoded[None, codec.mask_columns], lambda _: self._when(index * self._width + number))
        row[: encoded.size] = encoded.reshape(-1)

    def _mask(
        self, masks: MaskReader, index: int, number: int, observation: Any, infos: Any, terminated: bool
    ) -> Array | int:
        if terminated:
            return 1
        info = infos.get(self.agents[number])
        own = info if isinstance(info, Mapping) else {}
        when = functools.partial(self._when, index * self._width + number)
        return masks.read(self.envs[index], observation, own, when)

    def _clear_row(self, index: int, number: int) -> None:
        """The row of an agent that is not there."""
        row = self._obs[index * self._width + number]
        row[...] = 0
        codec = self.observation if self.team is None else self.team.of_agent[number].observation
        if codec.mask:
            row[codec.mask_columns] = 1

    def _check_observations(self, index: int, observations: Mapping[Any, Any], where: str) -> None:
        check_names(observations, self.envs[index])
        for name, observation in observations.items():
            check_observation(observation, self.envs[index].observation_spaces[name], where)

    # -- a step of one environment ----------------------------------------------------------------------------------

    def _advance(self, index: int, acts: list[Any]) -> None:
        """`acts`: an action for each agent; those of absent ones are not used."""
        env, names, here, rows = self.envs[index], self.agents, self._here[index], self._rows(index)
        assert self.valid is not None and self.stepped is not None and self.over is not None
        if self._gone[index]:
            self._clear_gone(index)
        self.valid[rows] = self._presence[index]
        if here is self._all_here:
            result = env.step(dict(zip(names, acts, strict=True)))
        else:
            result = env.step({names[number]: acts[number] for number in here})
        if not self._checked:
            check_agents_step(result, env)
            self._check_observations(index, result[0], "step")
            self._refuse_late_masks(result[4])
        try:
            observations, rewards, terminated, truncated, infos = result
            steady = here is self._all_here and len(observations) == self._width and len(rewards) == self._width
            if steady and not any(terminated.values()) and not any(truncated.values()):
                self._reward[rows] = [rewards[name] for name in names]
                if self.observation.is_plain and self.masks is None:
                    parts = [observations[name] for name in names]
                    np.concatenate(parts, out=self._obs[rows].reshape(-1), casting="unsafe")
                else:
                    for number, name in enumerate(names):
                        self._encode(index, number, observations[name], infos)
                over = False
            else:
                over = self._change(index, *result)
        except (TypeError, ValueError, LookupError, AttributeError):
            check_agents_step(result, env)  # says what is wrong
            self._check_observations(index, result[0], "step")
            raise
        self.stepped[index], self.over[index], self._done[index] = True, over, over
        if over:
            self._read_metrics(infos, index)

    def _clear_gone(self, index: int) -> None:
        """The last observation of an agent stays for one step, for the value after a truncation. After that its row is
        zero: it might hold NaN, and 0 x NaN is NaN."""
        start = index * self._width
        for number in self._gone[index]:
            row = start + number
            self._clear_row(index, number)
            self._reward[row] = 0.0
            self._terminated[row] = self._truncated[row] = False
        self._gone[index] = []

    def _change(
        self,
        index: int,
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, float],
        terminated: Mapping[Any, bool],
        truncated: Mapping[Any, bool],
        infos: Any,
    ) -> bool:
        """A step in which agents may end, leave or come. Returns whether the environment's episode is over."""
        start, names = index * self._width, self.agents
        staying: list[int] = []
        gone: list[int] = []
        everyone = bool(terminated.get(ALL)), bool(truncated.get(ALL))
        acted = self._here[index]
        for number in acted:
            name, row = names[number], start + number
            self._reward[row] = rewards.get(name, 0.0)
            ends, cut = bool(terminated.get(name, everyone[0])), bool(truncated.get(name, everyone[1]))
            if any(everyone) and not ends and not cut:
                ends, cut = everyone
            if name in observations:
                self._encode(index, number, observations[name], infos, ends)
            elif not ends and not cut:
                cut = True
                self._left[index].add(number)
            self._terminated[row], self._truncated[row] = ends, cut
            (gone if ends or cut else staying).append(number)
        for name in observations:
            number = self._find(name, index)
            if number in acted or any(everyone) or terminated.get(name) or truncated.get(name):
                continue
            if number in self._left[index]:
                raise UserError(
                    f"agent {name} had no observation for a while and came back: agents that take turns are not "
                    "supported; give every agent an observation at every step, or set its flag when it leaves"
                )
            self._encode(index, number, observations[name], infos)
            staying.append(number)
        self._gone[index] = gone
        self._set_present(index, sorted(staying))
        if any(everyone):
            return True
        self._empty[index] = 0 if staying else self._empty[index] + 1
        if self._empty[index] > MAX_EMPTY_STEPS:
            raise UserError(f"the env had no agents for {MAX_EMPTY_STEPS:,} steps: set the flag `{ALL}` at its end")
        return not staying and ALL not in terminated and ALL not in truncated

    def _find(self, name: Any, index: int) -> int:
        number = self._number.get(name)
        if number is None:
            check_names({name: None}, self.envs[index])
            raise AssertionError
        return number

    def _read_metrics(self, infos: Mapping[Any, Any], index: int) -> None:
        """`metrics` of the environment, or of each of its agents."""
        found = [infos, *(info for info in infos.values() if isinstance(info, Mapping))]
        self.finished_metrics += [(index, read_metrics(info["metrics"])) for info in found if "metrics" in info]

    def _replay_step(self, index: int, act: Any) -> None:
        self._advance(index, self._split(np.asarray(act)))

    def _as_saved(self, actions: list[Any]) -> Array:
        return np.stack(actions) if actions else np.zeros((0, self._width, *self.action.shape), self.action.dtype)

    def _from_saved(self, packed: Array) -> list[Any]:
        return list(packed)


def _has_masks(infos: Any) -> bool:
    return isinstance(infos, Mapping) and any(isinstance(info, Mapping) and MASK in info for info in infos.values())


def sync_vector(
    makers: Sequence[Callable[[], Any]],
    *,
    restart_on_error: int = 0,
    first_episode: int = 0,
    on_made: Callable[[], None] = lambda: None,
    **options: Unpack[VectorOptions],
) -> SyncVector:
    """The vector environment that steps these environments, of one or of several agents, in this process."""
    first = makers[0]()
    kind = AgentsVector if isinstance(first, AgentsEnv) else SyncVector
    own: dict[str, Any] = {"restart_on_error": restart_on_error, "first_episode": first_episode, "on_made": on_made}
    return kind(makers, first=first, **own, **options)
