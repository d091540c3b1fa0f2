"""Several vector environments side by side: the policy acts for one while the others step, in threads or processes of
their own."""

from __future__ import annotations

import time

from paceline.rollout.collector import Collector
from paceline.spaces import Array


class TurnsCollector(Collector):
    def _run(self, noise: Array, least: int) -> tuple[int, float]:
        self._seconds, t = 0.0, 0
        for t in range(len(self.batch.reward)):
            for index, (env, place) in enumerate(zip(self.envs, self._places, strict=True)):
                if t:
                    self._receive(t - 1, index)
                action = self._act(t, place, noise[t, place])
                before = time.perf_counter()
                env.send(action)
                self._seconds += time.perf_counter() - before
            self.steps_taken += 1
            if self.halted and t + 1 >= least:
                break
        for index in range(len(self.envs)):
            self._receive(t, index)
        return t + 1, self._seconds

    def _act(self, t: int, place: slice, noise: Array) -> Array:
        """The actions of step t in one vector, noted in the batch."""
        batch = self.batch
        action, logp, value = self.policy.act(batch.obs[t, place], noise)
        batch.action[t, place] = action
        self._judged = logp is not None and value is not None
        if self._judged:
            batch.logp[t, place], batch.value[t, place] = logp, value
        return action

    def _receive(self, t: int, index: int) -> None:
        """The outcome of step t of one vector."""
        batch, place, before = self.batch, self._places[index], time.perf_counter()
        obs, self._reward[t, place], batch.terminated[t, place], batch.truncated[t, place] = self.envs[index].receive()
        self._seconds += time.perf_counter() - before
        self._put(t + 1, index, obs)
