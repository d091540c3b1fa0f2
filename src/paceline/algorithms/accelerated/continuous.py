"""SAC's and TD3's gradients by hand, in two stages. Each stage has two pieces of nearly equal work that share nothing:
with a second thread they run at once, with the same numbers, bit for bit."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.algorithms.rows import Floats
from paceline.models.actor_critics import MAX_LOG_STD, MIN_LOG_STD
from paceline.models.numpy_mlp import ONE, ThreadChooser, Tower

if TYPE_CHECKING:
    from paceline.algorithms.base import Metrics
    from paceline.algorithms.continuous import ContinuousControl, Transitions
    from paceline.algorithms.sac import SAC
    from paceline.algorithms.td3 import TD3

LOG_2 = np.float32(math.log(2))
HALF_LOG_2PI = np.float32(0.5 * math.log(2 * math.pi))


class ContinuousAccelerator(ABC):
    def __init__(self, algorithm: ContinuousControl) -> None:
        self.algorithm: Any = algorithm
        policy = self.policy = algorithm.policy
        self._in_two = False
        # TD3's steps with the actor take longer than those without.
        self._choosers = {moves_actor: ThreadChooser() for moves_actor in (False, True)}
        activation = policy.net.activation
        self.actor, self.next_actor = Tower(policy.net.policy, activation), Tower(policy.net.policy, activation)
        # `judges` are the critics, too, with arrays of their own: for the actor's actions.
        self.critics, self.judges, self.targets = (
            [Tower(critic.policy, activation) for critic in (pair.first, pair.second)]
            for pair in (policy.extra, policy.extra, policy.target_critics)
        )
        self.actions = slice(policy.observation.size, None)
        """The columns of a critic's input."""

    def gradients(self, rows: Transitions) -> Metrics:
        """The gradient of the loss into the policy's flat gradient; returns the statistics."""
        chooser, began = self._choosers[self.algorithm.moves_actor], time.perf_counter()
        self._in_two = self.policy.helper is not None and chooser.choose()
        statistics = self.find(rows)
        chooser.took(time.perf_counter() - began)
        return statistics

    @abstractmethod
    def find(self, rows: Transitions) -> Metrics:
        """The same; `both` is ready."""

    def both(self, here: Callable[[], object], there: Callable[[], object]) -> None:
        """Run two pieces of work that share nothing, at once if that is faster."""
        if self._in_two:
            assert self.policy.helper is not None
            self.policy.helper.both(here, there)
        else:
            here()
            there()

    def learn_critic(self, index: int, target: Floats) -> None:
        """The gradient of half the mean squared error, after the critic's forward pass."""
        tower = self.critics[index]
        tower.backward((tower.out - target) / np.float32(len(target)))

    def learn_critics(self, target: Floats) -> None:
        for index in (0, 1):
            self.learn_critic(index, target)

    def least_target(self, x: Floats) -> Floats:
        """The smaller of both target critics' values, `[B]`."""
        first, second = (tower.forward(x)[0] for tower in self.targets)
        least: Floats = np.minimum(first, second)
        return least

    def statistics(self, target: Floats) -> Metrics:
        q = np.concatenate([tower.out for tower in self.critics])
        error = q - target
        return {
            "q_mean": float(q.mean()),
            "td_error_mean": float(np.abs(error).mean()),
            "critic_loss": 0.5 * float(np.vdot(error, error)) / len(target),
        }


class SACAccelerator(ContinuousAccelerator):
    algorithm: SAC

    def find(self, rows: Transitions) -> Metrics:
        algorithm, count, temperature = self.algorithm, len(rows.reward), np.float32(self.algorithm.temperature())
        now, later, (first, second) = Sampled(), Sampled(), self.judges
        taken = np.hstack([rows.obs, rows.action])
        found: dict[str, Floats] = {}

        def act() -> None:
            self.critics[0].forward(taken)
            now.draw(self.actor.forward(rows.obs), rows.noise)
            found["drawn"] = np.hstack([rows.obs, now.action])
            first.forward(found["drawn"])

        def aim() -> None:
            later.draw(self.next_actor.forward(rows.next_obs), rows.next_noise)
            least = self.least_target(np.hstack([rows.next_obs, later.action]))
            found["target"] = rows.reward + rows.discount * (least - temperature * later.log_prob)

        def learn_actor() -> None:
            second.forward(found["drawn"])
            of_first = np.where(first.out <= second.out, np.float32(-1 / count), np.float32(0))
            slope = first.input_gradient(of_first, self.actions)
            slope += second.input_gradient(np.float32(-1 / count) - of_first, self.actions)
            self.actor.backward(now.gradient(slope, temperature / np.float32(count)))

        def learn_critics() -> None:
            self.critics[1].forward(taken)
            self.learn_critics(found["target"])

        self.both(act, aim)
        self.both(learn_actor, learn_critics)
        log_prob = float(now.log_prob.mean())
        policy_loss = float(temperature) * log_prob - float(np.minimum(first.out, second.out).mean())
        statistics = self.statistics(found["target"])
        statistics |= {"policy_loss": policy_loss, "entropy": -log_prob, "temperature": float(temperature)}
        statistics["total_loss"] = statistics["critic_loss"] + policy_loss
        log_temperature = algorithm.log_temperature
        if log_temperature is not None:
            assert log_temperature.grad is not None
            log_temperature.grad.fill_(-(log_prob + algorithm.target_entropy))
            statistics["total_loss"] -= log_temperature.item() * (log_prob + algorithm.target_entropy)
        return statistics


class Sampled:
    """Actions drawn from the actor's outputs, and what their gradient needs. Arrays are `[B, A]`."""

    def draw(self, out: Floats, noise: Floats) -> None:
        actions = noise.shape[1]
        mean, raw = out[:actions].T, out[actions:].T
        log_std = np.minimum(np.maximum(raw, np.float32(MIN_LOG_STD)), np.float32(MAX_LOG_STD))
        self.inside, self.spread = log_std == raw, np.exp(log_std) * noise
        u = mean + self.spread
        self.action = np.tanh(u)
        # log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2|u|))), which does not lose its digits at large u.
        size = np.abs(u)
        slope = LOG_2 - size - np.log1p(np.exp(np.float32(-2) * size))
        each = np.float32(-0.5) * noise * noise - log_std - HALF_LOG_2PI - np.float32(2) * slope
        self.log_prob: Floats = each.sum(axis=1)

    def gradient(self, d_action: Floats, weight: np.float32) -> Floats:
        """d loss / d out `[2A, B]`, given that with respect to the actions and the weight of a log-probability."""
        d_u = d_action * (ONE - self.action * self.action) + weight * np.float32(2) * self.action
        d_log_std = (d_u * self.spread - weight) * self.inside
        return np.ascontiguousarray(np.hstack([d_u, d_log_std]).T, np.float32)


class TD3Accelerator(ContinuousAccelerator):
    algorithm: TD3

    def __init__(self, algorithm: TD3) -> None:
        super().__init__(algorithm)
        net = algorithm.policy.target_net
        assert net is not None
        self.next_actor = Tower(net.policy, net.activation)

    def find(self, rows: Transitions) -> Metrics:
        hyper, count, moves_actor = self.algorithm.hyper, len(rows.reward), self.algorithm.moves_actor
        judge, taken = self.judges[0], np.hstack([rows.obs, rows.action])
        found: dict[str, Floats] = {}

        def act() -> None:
            for critic in self.critics:
                critic.forward(taken)
            if moves_actor:
                found["action"] = np.tanh(self.actor.forward(rows.obs).T)

        def aim() -> None:
            limit = np.float32(hyper.target_noise_clip)
            noise = np.clip(np.float32(hyper.target_noise) * rows.next_noise, -limit, limit)
            action = np.clip(np.tanh(self.next_actor.forward(rows.next_obs).T) + noise, -ONE, ONE)
            found["target"] = rows.reward + rows.discount * self.least_target(np.hstack([rows.next_obs, action]))

        def learn_actor() -> None:
            action = found["action"]
            judge.forward(np.hstack([rows.obs, action]))
            d_action = judge.input_gradient(np.full((1, count), np.float32(-1 / count)), self.actions)
            self.actor.backward(np.ascontiguousarray((d_action * (ONE - action * action)).T))

        self.both(aim, act)
        target, policy_loss = found["target"], 0.0
        if moves_actor:
            self.both(learn_actor, lambda: self.learn_critics(target))
            policy_loss = -float(judge.out.mean())
        else:
            self.policy.gradient[self.policy.actor_slice] = 0
            self.both(lambda: self.learn_critic(0, target), lambda: self.learn_critic(1, target))
        statistics = self.statistics(target)
        statistics["total_loss"] = statistics["critic_loss"] + policy_loss
        return statistics | {"policy_loss": policy_loss * hyper.policy_delay}
