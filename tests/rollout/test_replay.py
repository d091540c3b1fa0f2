from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from paceline.config import UserError
from paceline.rollout import replay as module
from paceline.rollout.batch import Batch
from paceline.rollout.replay import Replay
from paceline.spaces import ActionCodec, ObservationCodec

OBSERVATION = ObservationCodec(spaces.Box(-np.inf, np.inf, (2,), np.float32))
ACTION = ActionCodec(spaces.Discrete(3))
GAMMA = 0.9


class World:
    """Environments whose observation is (env, number of the slot since the start), so that each tells where it is
    from; episodes end in both ways."""

    def __init__(self, num_envs: int = 3, *, seed: int = 0, ends: float = 0.12) -> None:
        self.rng, self.ends, self.n = np.random.default_rng(seed), ends, num_envs
        self.t = 0
        self.done = np.zeros(num_envs, np.bool_)
        self.rows: dict[tuple[int, int], dict[str, Any]] = {}  # by env and time

    def rollout(self, steps: int) -> Batch:
        batch, n = Batch.empty(steps, self.n, OBSERVATION, ACTION), self.n
        for t in range(steps + 1):
            batch.obs[t, :, 0], batch.obs[t, :, 1] = np.arange(n), self.t + t
        for t in range(steps):
            batch.valid[t] = ~self.done
            batch.action[t] = self.rng.integers(3, size=(n, 1))
            batch.reward[t] = self.rng.normal(size=n) * batch.valid[t]
            batch.terminated[t] = (self.rng.random(n) < self.ends) & ~self.done
            batch.truncated[t] = (self.rng.random(n) < self.ends) & ~self.done & ~batch.terminated[t]
            self.done = batch.terminated[t] | batch.truncated[t]
            for env in range(n):
                names = ("reward", "terminated", "truncated", "valid")
                row = {name: getattr(batch, name)[t, env] for name in names}
                self.rows[env, self.t + t] = row | {"action": batch.action[t, env, 0]}
        self.t += steps
        return batch

    def jump(self) -> None:
        """The next rollout begins elsewhere: in new episodes."""
        self.t += 1000
        self.done[:] = False

    def expected(self, env: int, t: int, n: int, newest: int) -> tuple[float, float, int]:
        """n-step reward, discount and the time of what follows, one step at a time."""
        total, k = 0.0, 0
        while True:
            row = self.rows[env, t + k]
            total += GAMMA**k * float(row["reward"])
            k += 1
            if row["terminated"]:
                return total, 0.0, t
            if row["truncated"] or k == n or t + k > newest or (env, t + k) not in self.rows:
                return total, GAMMA**k, t + k


def make(world: World, capacity: int, **options: Any) -> Replay:
    return Replay(capacity, world.n, OBSERVATION, ACTION, **options)


def held(replay: Replay) -> np.ndarray:
    return np.flatnonzero(replay._valid.reshape(-1))


def check(replay: Replay, world: World, n: int, newest: int) -> set[tuple[int, int]]:
    """All rows that are held; returns which."""
    index = held(replay)
    sample = replay.gather(index, n_step=n, gamma=GAMMA)
    seen = set()
    for b in range(len(index)):
        env, t = int(sample.obs[b, 0]), int(sample.obs[b, 1])
        row = world.rows[env, t]
        assert row["valid"] and sample.action[b] == row["action"]
        reward, discount, after = world.expected(env, t, n, newest)
        assert sample.reward[b] == pytest.approx(reward, abs=1e-5)
        assert sample.discount[b] == pytest.approx(discount)
        assert tuple(sample.next_obs[b]) == (env, after)
        seen.add((env, t))
    return seen


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("capacity", [1000, 60, 62])
def test_rows_come_back_with_what_followed(n: int, capacity: int) -> None:
    world = World()
    replay = make(world, capacity)
    for steps in (4, 9, 1, 16, 5, 9):
        replay.add(world.rollout(steps), continues=world.t > steps)
        seen = check(replay, world, n, world.t - 1)
        # All valid rows of the last C - 1: the slot after the newest holds where that led to.
        oldest = world.t - (capacity // world.n - 1)
        assert seen == {key for key, row in world.rows.items() if row["valid"] and key[1] >= oldest}
        assert len(replay) == len(seen)


@pytest.mark.parametrize("n", [1, 4])
def test_an_episode_that_is_broken_off_bootstraps_from_where_it_was(n: int) -> None:
    world = World(ends=0.0)
    replay = make(world, 90)
    for _ in range(5):
        replay.add(world.rollout(6), continues=False)
        world.jump()
        check(replay, world, n, world.t)


def test_rollouts_side_by_side_are_several() -> None:
    world, replay = World(6), make(World(3), 90)
    batch = world.rollout(5)
    replay.add(batch, continues=True)
    assert {(int(e), int(t)) for e, t in replay.gather(held(replay), n_step=1, gamma=GAMMA).obs} == {
        key for key, row in world.rows.items() if row["valid"]
    }


def test_every_row_is_as_likely() -> None:
    world = World(ends=0.3)
    replay = make(world, 60)
    for steps in (10, 12, 10):
        replay.add(world.rollout(steps), continues=True)
    index = replay.sample(np.random.default_rng(0), 40_000, n_step=1, gamma=GAMMA).index
    counts = np.bincount(index, minlength=60)[held(replay)]
    assert counts.sum() == 40_000
    expected = 40_000 / len(replay)
    assert ((counts - expected) ** 2 / expected).sum() < 2 * len(replay)  # chi square, far beyond chance


def test_rows_are_drawn_by_their_priority_and_weighed_for_it() -> None:
    world, rng = World(ends=0.2), np.random.default_rng(0)
    replay = make(world, 60, prioritized=True)
    for steps in (10, 12, 10):
        batch = world.rollout(steps)
        replay.add(batch, continues=True, priority=rng.random(batch.reward.shape).astype(np.float32) + 0.1)
    changed = held(replay)[::3]
    replay.reprioritize(changed, np.full(len(changed), 3.0))
    index = held(replay)
    assert replay.tree is not None
    priority = replay.tree[index]
    assert replay.tree.total == pytest.approx(priority.sum())  # what was overwritten or only resets has none
    assert (priority[::3] == 3.0).all() and (priority[1::3] <= 1.1).all()
    probability = priority / priority.sum()
    draws = [replay.sample(rng, 64, n_step=1, gamma=GAMMA, beta=0.7) for _ in range(500)]
    drawn = np.concatenate([d.index for d in draws])
    counts = np.bincount(drawn, minlength=60)[index]
    assert counts.sum() == len(drawn)
    expected = len(drawn) * probability
    assert ((counts - expected) ** 2 / expected).sum() < 2 * len(index)
    exact = (len(replay) * priority[np.searchsorted(index, draws[0].index)] / priority.sum()) ** -0.7
    assert draws[0].weight is not None
    np.testing.assert_allclose(draws[0].weight, exact / exact.max(), rtol=1e-5)


def test_no_number_comes_of_an_end_that_is_none() -> None:
    world = World(1, ends=0.0)
    batch = world.rollout(3)
    batch.terminated[1], batch.obs[2] = True, np.nan
    batch.valid[2] = False
    replay = make(world, 20)
    replay.add(batch, continues=True)
    sample = replay.gather(held(replay), n_step=2, gamma=GAMMA)
    assert np.isfinite(sample.next_obs).all() and list(sample.discount) == [0, 0]


def test_images_stay_bytes() -> None:
    observation = ObservationCodec(spaces.Box(0, 255, (3, 40, 40), np.uint8))
    replay = Replay(40, 2, observation, ACTION)
    assert replay.observation_bytes == 40 * 3 * 40 * 40
    batch = Batch.empty(4, 2, observation, ACTION)
    batch.valid[:] = True
    replay.add(batch, continues=True)
    assert replay.gather(held(replay), n_step=1, gamma=GAMMA).obs.dtype == np.uint8


def test_too_small_says_what_it_takes() -> None:
    with pytest.raises(UserError, match=r"replay_size=12 is too small.*needs 18"):
        make(World(), 12).add(World().rollout(4), continues=True)


def test_a_disk_that_is_too_small_says_so_at_once(tmp_path: Path) -> None:
    observation = ObservationCodec(spaces.Box(0, 255, (512, 512, 3), np.uint8))
    replay = Replay(20_000_000, 8, observation, ACTION, on_disk=True)
    with pytest.raises(UserError, match=r"dqn\.replay=disk: .*observations\.npy needs 15728\.6 GB .* are free"):
        replay.open(tmp_path)
    assert not list(tmp_path.iterdir())


# -- saving ---------------------------------------------------------------------------------------------------------


def filled(world: World, rollouts: int, folder: Path | None = None, capacity: int = 61) -> Replay:
    replay = make(world, capacity, prioritized=True, on_disk=folder is not None)
    if folder is not None:
        replay.open(folder)
    more(replay, world, rollouts)
    return replay


def more(replay: Replay, world: World, rollouts: int) -> None:
    for _ in range(rollouts):
        replay.add(world.rollout(4), continues=True, priority=np.full((4, world.n), world.t, np.float32))


def saved(replay: Replay) -> Any:
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in (replay.state() or {}).items()}


@pytest.mark.parametrize("rollouts", [2, 7])
@pytest.mark.parametrize("on_disk", [False, True])
def test_it_goes_on_where_it_was_saved(tmp_path: Path, rollouts: int, on_disk: bool) -> None:
    folder, world = tmp_path if on_disk else None, World()
    state = saved(filled(world, rollouts, folder))
    assert (state["obs"] is None) is on_disk
    again = filled(World(), 0, folder)
    assert again.load(state) is None
    for _ in range(3):
        seen = check(again, world, 3, world.t - 1)
        oldest = world.t - (60 // 3 - 1)
        assert seen == {key for key, row in world.rows.items() if row["valid"] and key[1] >= oldest}
        assert again.tree is not None
        assert again.tree.total == pytest.approx(again.tree[held(again)].sum())
        more(again, world, 1)


def test_rows_written_after_the_mark_are_not_those_that_were_there(tmp_path: Path) -> None:
    world = World()
    one = filled(world, 7, tmp_path)
    mark, state = world.t, saved(one)
    more(one, world, 2)  # and then the process is killed
    two = filled(World(), 0, tmp_path)
    told = two.load(state)
    assert told is not None and "8 x 3 are lost" in told
    oldest = world.t - (60 // 3 - 1)
    valid = {key for key, row in world.rows.items() if row["valid"]}
    assert check(two, world, 3, mark - 1) == {key for key in valid if oldest <= key[1] < mark}
    assert two.tree is not None and (two.tree[held(two)] > 0).all()
    assert two.tree.total == pytest.approx(two.tree[held(two)].sum())


def test_a_second_cut_before_the_next_checkpoint(tmp_path: Path) -> None:
    """What the first run had written after the mark is still not what was there."""
    world = World()
    one = filled(world, 7, tmp_path)
    mark, state = world.t, saved(one)
    more(one, world, 2)
    two = filled(World(), 0, tmp_path)
    two.load(state)
    two.add(World().rollout(4), continues=False, priority=np.ones((4, 3), np.float32))
    three = filled(World(), 0, tmp_path)
    assert "8 x 3 are lost" in str(three.load(state))
    check(three, world, 1, mark - 1)


def test_a_file_of_observations_that_is_gone(tmp_path: Path) -> None:
    state = saved(filled(World(), 7, tmp_path))
    (tmp_path / "observations.npy").unlink()
    again = filled(World(), 0, tmp_path)
    assert "empty: " in str(again.load(state)) and len(again) == 0


def test_what_cannot_be_restored_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    one = filled(world, 3)
    assert "of 3 environments, now there are 4" in str(filled(World(4), 0).load(saved(one)))
    other = filled(World(), 0, tmp_path)
    assert "not the file of this run" in str(other.load(saved(one)))
    assert len(other) == 0
    monkeypatch.setattr(module, "MAX_SAVED_BYTES", 100)
    assert one.state() is None
    assert "empty: " in str(filled(World(), 0).load(None))
