"""Collecting with the network on a GPU: frames go there once and stay, and only actions come back at every step."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paceline.model.device import Acting, DevicePolicy, pinned
from paceline.rollout.batch import Batch
from paceline.rollout.collector import Vector
from paceline.rollout.turns import TurnsCollector
from paceline.spaces import Array


class DeviceCollector(TurnsCollector):
    """All its vectors have as many environments. `buffers=2`: the frames of a rollout stay while the next is collected.

    On a stream of its own, ahead of those of learning: what it asks of the GPU is little, and the environments wait.
    """

    def __init__(
        self,
        envs: Sequence[Vector],
        policy: DevicePolicy,
        *,
        steps: int,
        rng: np.random.Generator,
        discount: float | None = None,
        clip_reward: bool = False,
        buffers: int = 1,
    ) -> None:
        self._device_policy, self._device = policy, policy.device
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        super().__init__(envs, policy, steps=steps, rng=rng, discount=discount, clip_reward=clip_reward)
        others = (self._make_batch(steps, self.batch.reward.shape[1]) for _ in range(buffers - 1))
        self._batches = deque([self.batch, *others])  # the present one first
        rows = {env.num_envs for env in envs}
        assert len(rows) == 1, "vectors of one size"
        self._acting = Acting(policy, rows.pop())
        slots = self.batch.value.shape
        self._logp = torch.zeros(slots, device=self._device)
        self._value = torch.zeros(slots, device=self._device)
        self._noise = torch.zeros(0)
        self._staging = [pinned(np.zeros((env.num_envs, *self.batch.obs.shape[2:]), np.uint8)) for env in envs]
        self._action, self._action_array = pinned(np.zeros(envs[0].num_envs, np.int64))

    def _make_batch(self, steps: int, num_envs: int) -> Batch:
        batch = super()._make_batch(steps, num_envs)
        return replace(batch, obs=torch.zeros(batch.obs.shape, dtype=torch.uint8, device=self._device))

    def publish(self) -> None:
        """From now on the policy's present weights act."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._acting.publish()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def start(self) -> None:
        super().start()
        self._wait()

    def collect(self, version: int = 0) -> Batch:
        before = self.batch
        self._batches.rotate(-1)
        self.batch = self._batches[0]
        with self._on_stream():
            if self.batch is not before:
                self.batch.obs[-1] = before.obs[-1]
            batch = super().collect(version)
            batch.logp[...] = self._logp[: len(batch.logp)].cpu().numpy()
            batch.value[...] = self._value[: len(batch.value)].cpu().numpy()
        return batch

    def _run(self, noise: Array, least: int) -> tuple[int, float]:
        self._noise = torch.from_numpy(noise).to(self._device)
        return super()._run(noise, least)

    def _act(self, t: int, place: slice, noise: Array) -> Array:
        acting = self._acting
        acting.noise.copy_(self._noise[t, place])
        self._judge_state(t, place)
        self._logp[t, place] = acting.logp
        self._action.copy_(acting.action, non_blocking=True)
        self._wait()
        action = self._action_array[:, None].copy()
        self.batch.action[t, place] = action
        return action

    def _judge_state(self, t: int, place: slice) -> None:
        self._acting.obs.copy_(self.batch.obs[t, place])
        self._acting.run()
        self._value[t, place] = self._acting.value

    def _conclude(self, batch: Batch) -> None:
        for place in self._places:
            self._judge_state(len(batch.reward), place)

    def _put(self, t: int, index: int, obs: Array) -> None:
        staging, array = self._staging[index]
        array[...] = obs  # its last copy to the device has been waited for, with the action that came of it
        self.batch.obs[t, self._places[index]].copy_(staging, non_blocking=True)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _last_observation(self) -> Array:
        last: Array = self.batch.obs[-1].cpu().numpy()
        return last
