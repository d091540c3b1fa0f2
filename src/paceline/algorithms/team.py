"""Several policies that learn side by side: each has an algorithm of its own and learns from the rows of its agents."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.algorithms.base import Algorithm, Metrics, Weights
from paceline.collective.group import Group
from paceline.lazy import np
from paceline.models.team import TeamPolicy
from paceline.rollout.batch import PER_STATE, PER_STEP, Batch


class TeamAlgorithm:
    """Looks like one `Algorithm` to engines. `members`: the algorithms of the policies that learn; others are frozen.

    All members share one generator, which they use in turn.
    """

    def __init__(self, policy: TeamPolicy, members: dict[str, Algorithm], rng: np.random.Generator) -> None:
        self.policy, self.members, self.rng = policy, members, rng
        self._group = Group()
        self.sharing = next(iter(members.values())).sharing
        self.version = 0

    @property
    def optimizer_steps(self) -> int:
        return sum(member.optimizer_steps for member in self.members.values())

    @property
    def group(self) -> Group:
        return self._group

    @group.setter
    def group(self, group: Group) -> None:
        self._group = group
        for member in self.members.values():
            member.group = group

    def update(self, batch: Batch, remaining: float) -> Metrics:
        """Metrics of each policy as `policy/NAME/METRIC`, and their means over the policies."""
        metrics: Metrics = {}
        totals: dict[str, list[float]] = {}
        for index, part in enumerate(self.policy.team.parts):
            if part.name not in self.members:
                continue
            own = self.members[part.name].update(self.rows_of(batch, index), remaining)
            metrics |= {f"policy/{part.name}/{name}": value for name, value in own.items()}
            for name, value in own.items():
                totals.setdefault(name, []).append(value)
        self.version += 1
        return {name: float(np.mean(values)) for name, values in totals.items()} | metrics

    def update_quietly(self, batch: Batch, remaining: float) -> None:
        self.update(batch, remaining)

    def rows_of(self, batch: Batch, index: int) -> Batch:
        """The batch of one policy."""
        part, rows = self.policy.team.parts[index], self.policy.team.rows(index, batch.reward.shape[1])
        arrays = {name: getattr(batch, name)[:, rows] for name in (*PER_STATE, *PER_STEP)}
        arrays["obs"], arrays["action"] = part.read_obs(arrays["obs"]), part.read_action(arrays["action"])
        return Batch(**arrays, version=batch.version)

    # -- what engines tell it ---------------------------------------------------------------------------------------

    def _tell(self, call: Callable[[Algorithm], Any]) -> list[Any]:
        return [call(member) for member in self.members.values()]

    def set_scratch_dir(self, folder: Path) -> None:
        self._tell(lambda member: member.set_scratch_dir(folder))

    def interrupted(self) -> None:
        self._tell(lambda member: member.interrupted())

    def restored(self) -> dict[str, str]:
        return {}

    def act_as(self, actor: int, actors: int) -> None:
        self._tell(lambda member: member.act_as(actor, actors))

    def change(self, name: str, value: Any) -> None:
        self._tell(lambda member: member.change(name, value))

    def notes(self) -> list[str]:
        return [note for own in self._tell(lambda member: member.notes()) for note in own]

    # -- what other processes need ----------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """Also of frozen policies: an actor of a resumed run has them from nowhere else."""
        found: Weights = {"version": np.asarray([self.version])}
        for name, policy in self.policy.members.items():
            own = self.members[name].weights() if name in self.members else policy.state()
            found |= {f"{name}/{key}": np.array(array) for key, array in own.items()}
        return found

    def load_weights(self, weights: Weights) -> None:
        for name, policy in self.policy.members.items():
            start = f"{name}/"
            own = {key.removeprefix(start): array for key, array in weights.items() if key.startswith(start)}
            if name in self.members:
                self.members[name].load_weights(own)
            else:
                policy.load(own)
        self.version = int(weights["version"][0])

    def fingerprint(self) -> int:
        return zlib.crc32(repr(self._tell(lambda member: member.fingerprint())).encode())

    # -- saving -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return self._state(lambda member: member.state())

    def snapshot(self) -> dict[str, Any]:
        return self._state(lambda member: member.snapshot())

    def _state(self, of: Callable[[Algorithm], dict[str, Any]]) -> dict[str, Any]:
        members = {name: of(member) | {"policy": {}} for name, member in self.members.items()}
        return {
            "policy": self.policy.state(),
            "members": members,
            "rng": self.rng.bit_generator.state,
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.policy.load(state["policy"])
        for name, member in self.members.items():
            member.load(state["members"][name] | {"policy": member.policy.state()})
        self.rng.bit_generator.state = state["rng"]
        self.version = state["version"]
