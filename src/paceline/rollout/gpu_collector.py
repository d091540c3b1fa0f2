"""Collecting with the network on a GPU: frames are copied to it once and stay there; only actions come back."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paceline.envs.vector import VectorEnv
from paceline.models.gpu import Acting, GpuPolicy, pinned
from paceline.rollout.batch import Batch
from paceline.rollout.collector import InterleavedCollector
from paceline.spaces import Array


class GpuCollector(InterleavedCollector):
    """All vectors must have the same number of environments. With `buffers=2` the frames of a rollout remain valid
    while the next one is collected.

    Its CUDA stream has a higher priority than learning: its kernels are short, and environments wait for them.
    """

    def __init__(
        self, envs: Sequence[VectorEnv], policy: GpuPolicy, *, steps: int, buffers: int = 1, **options: Any
    ) -> None:
        """`options`: see `Collector`."""
        self._device = policy.device
        self._stream: Any = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        super().__init__(envs, policy, steps=steps, **options)
        others = (self._make_batch(steps, self.batch.reward.shape[1]) for _ in range(buffers - 1))
        self._batches = deque([self.batch, *others])  # the current one first
        rows = {env.rows for env in envs}
        assert len(rows) == 1, "vectors of different sizes"
        self._acting = Acting(policy, rows.pop())
        slots = self.batch.value.shape
        self._logp = torch.zeros(slots, device=self._device)
        self._value = torch.zeros(slots, device=self._device)
        self._noise = torch.zeros(0)
        self._staging = [pinned(np.zeros((env.rows, *self.batch.obs.shape[2:]), np.uint8)) for env in envs]
        self._action, self._action_array = pinned(np.zeros(envs[0].rows, np.int64))

    def _make_batch(self, steps: int, num_envs: int) -> Batch:
        batch = super()._make_batch(steps, num_envs)
        return replace(batch, obs=torch.zeros(batch.obs.shape, dtype=torch.uint8, device=self._device))

    def publish(self) -> None:
        """Act with the policy's current weights from now on."""
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

    def _run(self, noise: Array, min_steps: int) -> tuple[int, float]:
        self._noise = torch.from_numpy(noise).to(self._device)
        return super()._run(noise, min_steps)

    def _act(self, t: int, columns: slice, noise: Array) -> Array:
        acting = self._acting
        acting.noise.copy_(self._noise[t, columns])
        self._run_network(t, columns)
        self._logp[t, columns] = acting.logp
        self._action.copy_(acting.action, non_blocking=True)
        self._wait()
        action = self._action_array[:, None].copy()
        self.batch.action[t, columns] = action
        return action

    def _run_network(self, t: int, columns: slice) -> None:
        self._acting.obs.copy_(self.batch.obs[t, columns])
        self._acting.run()
        self._value[t, columns] = self._acting.value

    def _fill_values(self, batch: Batch) -> None:
        for columns in self._columns:
            self._run_network(len(batch.reward), columns)

    def _store(self, t: int, index: int, obs: Array) -> None:
        staging, array = self._staging[index]
        array[...] = obs  # its last copy to the GPU has finished: the action that depends on it has arrived
        self.batch.obs[t, self._columns[index]].copy_(staging, non_blocking=True)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _last_observation(self) -> Array:
        last: Array = self.batch.obs[-1].cpu().numpy()
        return last
