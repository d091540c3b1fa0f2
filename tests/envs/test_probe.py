from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env, data_equivalence

from paceline.config import UserError
from paceline.envs.probe import (
    PROBES,
    DelayedReward,
    Faulty,
    FixedCost,
    Identity,
    ImageSide,
    KnownReturn,
    Mixed,
    Numbered,
    Probe,
    TruncationOnly,
    register_probes,
)

KINDS = ("discrete", "multidiscrete", "multibinary", "box")
VARIANTS: list[tuple[type[Probe], dict[str, Any]]] = [
    *((Identity, {"space": kind}) for kind in KINDS),
    (KnownReturn, {}),
    (FixedCost, {"cost_seconds": 0.0, "length": 12}),
    (TruncationOnly, {}),
    (DelayedReward, {}),
    (ImageSide, {"size": 12}),
    (Mixed, {"size": 12}),
    (FixedCost, {"cost_seconds": 0.0, "cost_max_seconds": 1e-4, "length": 12}),
    (Numbered, {}),
    (Faulty, {"after": 100_000, "length": 12}),
]
every_variant = pytest.mark.parametrize(("probe", "kwargs"), VARIANTS, ids=lambda v: getattr(v, "__name__", str(v)))


def best_action(env: Any, observation: Any) -> Any:
    """What a learner should find, from the observation alone."""
    if isinstance(env, Identity):
        return observation
    if isinstance(env, DelayedReward):
        return int(observation[0] > 0)
    if isinstance(env, Mixed):
        return [side_of(observation["camera"]), observation["mode"], int(observation["state"][0] > 0)]
    if isinstance(env, ImageSide):
        return side_of(observation)
    return 0


def side_of(image: Any) -> int:
    middle = image.shape[1] // 2
    return int(image[:, middle:].max() > image[:, :middle].max())


def episode(env: Any, act: Any, seed: int | None = None) -> tuple[float, int, bool, bool, dict[str, Any]]:
    observation, _ = env.reset(seed=seed)
    total, steps = 0.0, 0
    while True:
        observation, reward, terminated, truncated, info = env.step(act(observation))
        total, steps = total + reward, steps + 1
        if terminated or truncated:
            return total, steps, terminated, truncated, info
        assert steps < 1000


@every_variant
def test_keeps_the_gymnasium_contract(probe: type[Probe], kwargs: dict[str, Any]) -> None:
    register_probes()
    env = gymnasium.make(f"paceline/{probe.__name__}-v0", **kwargs).unwrapped
    assert type(env) is probe
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env)


@every_variant
def test_the_best_policy_earns_the_optimum(probe: type[Probe], kwargs: dict[str, Any]) -> None:
    env: Any = probe(**kwargs)
    for seed in range(5):
        total, steps, *_ = episode(env, lambda o: best_action(env, o), seed)
        assert total == pytest.approx(env.optimum)
        assert steps == env.length


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (Identity(), 10 / 4),
        (Identity("multibinary"), 10 / 2),
        (Identity("box"), 10 * (1 - 2 / 3)),  # the mean distance of two uniform points of [-1, 1] is 2/3
        (DelayedReward(), 0.5),
        (ImageSide(size=12), 8 / 2),
        (Mixed(size=12), 8 * (1 / 2 + 1 / 3 + 1 / 2) / 3),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_random_policy_earns_less(env: Any, expected: float) -> None:
    env.action_space.seed(7)
    returns = [episode(env, lambda _: env.action_space.sample(), seed)[0] for seed in range(400)]
    error = float(np.std(returns)) / len(returns) ** 0.5
    assert abs(np.mean(returns) - expected) < 4 * error
    assert expected < 0.7 * env.optimum


@every_variant
def test_a_saved_state_continues_exactly(probe: type[Probe], kwargs: dict[str, Any]) -> None:
    env: Any = probe(**kwargs)
    env.action_space.seed(5)
    env.reset(seed=3)
    for _ in range(3):
        env.step(env.action_space.sample())
    saved = env.get_state()
    as_text = json.dumps(saved, default=lambda array: array.tolist())
    actions = [env.action_space.sample() for _ in range(15)]

    def follow(env: Any) -> list[Any]:
        trace = []
        for action in actions:
            result = env.step(action)
            trace.append(result)
            if result[2] or result[3]:
                trace.append(env.reset())
        return trace

    expected = follow(env)
    for state in (saved, json.loads(as_text)):
        other: Any = probe(**kwargs)
        other.reset(seed=99)
        other.set_state(state)
        assert data_equivalence(follow(other), expected, exact=True)


def test_a_saved_state_does_not_follow_the_env() -> None:
    env = Identity("box")
    env.reset(seed=0)
    saved = env.get_state()
    before = json.dumps(saved, default=lambda array: array.tolist())
    env.step(env.action_space.sample())
    assert json.dumps(saved, default=lambda array: array.tolist()) == before


def test_known_return() -> None:
    env = KnownReturn(length=4)
    total, steps, terminated, truncated, info = episode(env, lambda _: 1)
    assert (total, steps, terminated, truncated) == (4.0, 4, True, False)
    assert info == {"metrics": {"utility": 0.25}}
    assert KnownReturn.value(0.5, 0, length=4) == 1 + 0.5 + 0.25 + 0.125
    assert KnownReturn.value(0.5, 3, length=4) == 1.0
    assert KnownReturn.value(0.9, 4, length=4) == 0.0
    assert KnownReturn.value(1.0) == 10.0


def test_truncation_only_is_cut_and_never_ends() -> None:
    env = TruncationOnly()
    assert episode(env, lambda _: 0)[:4] == (5.0, 5, False, True)
    gamma = 0.9
    assert TruncationOnly.value(gamma) == pytest.approx(sum(gamma**k for k in range(1000)))
    assert KnownReturn.value(gamma, 0, env.length) < 0.5 * TruncationOnly.value(gamma)


def test_delayed_reward_comes_late_and_only_for_the_first_action() -> None:
    env = DelayedReward(delay=3)
    for first_is_right in (True, False):
        observation, _ = env.reset(seed=1)
        cue = int(observation[0] > 0)
        rewards = [env.step(cue if first_is_right else 1 - cue)[1]]
        rewards += [env.step(action)[1] for action in (0, 1)]
        observation, reward, terminated, truncated, _ = env.step(0)
        assert rewards == [0.0, 0.0, 0.0]
        assert (reward, terminated, truncated) == (float(first_is_right), True, False)


@pytest.mark.parametrize("busy", [True, False])
def test_fixed_cost_takes_its_time(busy: bool) -> None:
    env = FixedCost(cost_seconds=0.01, busy=busy)
    env.reset(seed=0)
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(5):
        env.step(0)
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    assert wall >= 0.05
    # A busy core may be taken away by others for a while, but sleeping uses next to nothing.
    assert (cpu > 0.01) is busy


def test_a_busy_step_costs_cpu_time_however_crowded_the_core_is() -> None:
    env = FixedCost(cost_seconds=0.005, busy=True)
    env.reset(seed=0)
    began = time.thread_time()
    for _ in range(4):
        env.step(0)
    assert 0.02 <= time.thread_time() - began < 0.04


def test_the_cost_can_be_drawn_for_each_episode() -> None:
    env = FixedCost(cost_seconds=0.001, cost_max_seconds=0.01)
    assert env.length == 200
    costs = []
    for episode_number in range(30):
        env.reset(seed=3 if episode_number == 0 else None)
        cost = env.cost
        env.step(0)
        assert env.cost == cost  # of the episode, not of the step
        costs.append(cost)
    assert len(set(costs)) == 30 and 0.001 <= min(costs) < 0.004 and 0.007 < max(costs) <= 0.01
    env.cost = 0.02
    began = time.perf_counter()
    env.step(0)
    assert time.perf_counter() - began >= 0.02


def test_no_two_observations_of_numbered_envs_are_alike() -> None:
    seen: list[tuple[int, int, int]] = []
    for seed in range(4):
        env = Numbered(length=3)
        observation, _ = env.reset(seed=seed)
        for _ in range(4):
            ended = False
            while not ended:
                seen.append(tuple(int(x) for x in observation))  # type: ignore[arg-type]
                observation, _, _, ended, _ = env.step(0)
            seen.append(tuple(int(x) for x in observation))  # type: ignore[arg-type]
            observation, _ = env.reset()
    assert len(set(seen)) == len(seen) == 4 * 4 * 4
    assert [index for _, _, index in seen] == [*range(16)] * 4
    assert len({stream[:2] for stream in seen}) == 4


def test_the_numbers_follow_from_the_seed_and_are_exact() -> None:
    env = Numbered()
    first, _ = env.reset(seed=5)
    env.step(0)
    again, _ = env.reset(seed=5)
    assert np.array_equal(first, again) and first[2] == 0
    assert not np.array_equal(env.reset(seed=6)[0][:2], first[:2])
    env.stream, env.index = 2**48 - 1, 2**24 - 3
    observation = env.step(0)[0]
    assert [int(x) for x in observation] == [2**24 - 1, 2**24 - 1, 2**24 - 2]
    assert observation in env.observation_space


def test_faulty_raises_once_and_in_one_of_several(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    envs = [Faulty(after=2, once=str(taken), length=2) for _ in range(3)]
    failures = []
    for number, env in enumerate(envs):
        env.reset(seed=number)
        for step in range(6):
            if step % 2 == 0:
                env.reset()  # steps are counted over episodes
            try:
                env.step(0)
            except RuntimeError as error:
                failures.append((number, step, str(error)))
                break
    assert failures == [(0, 2, "this probe env fails after 2 steps, as asked")]
    assert taken.exists()
    always = Faulty(after=0)
    always.reset(seed=0)
    with pytest.raises(RuntimeError, match="after 0 steps"):
        always.step(0)


@pytest.mark.parametrize("how", ["exit", "hang"])
def test_faulty_ends_or_stops_its_process(how: str) -> None:
    lines = (
        "from paceline.envs.probe import Faulty",
        f"env = Faulty({how!r}, after=3)",
        "env.reset(seed=0)",
        "for step in range(6): env.step(0); print(step, flush=True)",
    )
    process = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        if how == "exit":
            assert process.wait(timeout=30) == Faulty.EXIT_STATUS
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.3)
    finally:
        process.kill()
        rest, _ = process.communicate(timeout=30)
    assert rest == ""


def test_images_differ_between_sides_and_hold_one_patch() -> None:
    env = ImageSide()
    seen = set()
    for seed in range(20):
        image, _ = env.reset(seed=seed)
        assert image.shape == (36, 36, 3) and image.dtype == np.uint8
        assert int((image[..., 0] > 100).sum()) == 9 * 9
        assert side_of(image) == env.side
        seen.add(env.side)
    assert seen == {0, 1}


def test_registering_twice_is_harmless() -> None:
    register_probes()
    before = {env_id: spec for env_id, spec in gymnasium.registry.items() if env_id.startswith("paceline/")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # gymnasium warns of an id that is overridden
        register_probes()
    after = {env_id: spec for env_id, spec in gymnasium.registry.items() if env_id.startswith("paceline/")}
    assert set(after) == {f"paceline/{probe.__name__}-v0" for probe in PROBES}
    assert all(after[env_id] is before[env_id] for env_id in before)
    assert after["paceline/Identity-v0"].entry_point == "paceline.envs.probe:Identity"


@pytest.mark.parametrize(
    ("probe", "kwargs", "named"),
    [
        (Identity, {"space": "graph"}, "graph"),
        (ImageSide, {"size": 2}, "size=2"),
        (KnownReturn, {"length": 0}, "length=0"),
        (DelayedReward, {"delay": 0}, "delay=0"),
        (FixedCost, {"cost_seconds": -1.0}, "cost_seconds=-1.0"),
        (FixedCost, {"cost_seconds": 0.1, "cost_max_seconds": 0.05}, "cost_max_seconds=0.05"),
        (Faulty, {"how": "explode"}, "explode"),
        (Faulty, {"after": -1}, "after=-1"),
    ],
)
def test_impossible_arguments_are_refused(probe: type[Probe], kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        probe(**kwargs)
