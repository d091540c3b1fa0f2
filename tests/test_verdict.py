from __future__ import annotations

import itertools
import math
import re
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import paceline
from paceline.machine import Usage
from paceline.models import gpu
from paceline.verdict import MAX_GROWTH, WASTE_SHARE, WORK_SHARE, TimeSplit, Verdict, verdict


def judge(main: TimeSplit, actors: TimeSplit | None = None, **known: Any) -> Verdict:
    given: dict[str, Any] = {
        "algo": "ppo",
        "workers": 4,
        "nodes": 1,
        "cpu_share": None,
        "cores": 4,
        "straggling": None,
    } | known
    return verdict(main, actors, **given)


def of_run(cpu_of_env: float, workers: int, cores: int, **lane: float) -> Verdict:
    """Workers that compute in `act` and `learn`, and in `env` as much as said: with the CPU share that this gives."""
    seconds = workers * (cpu_of_env * lane.get("env", 0.0) + lane.get("act", 0.0) + lane.get("learn", 0.0))
    return judge(lane, workers=workers, cores=cores, cpu_share=seconds / (cores * sum(lane.values())))


def async_run(learner: TimeSplit, actors: TimeSplit, **known: Any) -> Verdict:
    return judge(learner, actors, **({"algo": "impala", "workers": 8, "cores": 16} | known))


REPLICAS: list[tuple[TimeSplit, dict[str, Any], str, float, list[str]]] = [
    ({"env": 80, "act": 12, "learn": 8}, {"cpu_share": 0.95}, "env", 0.8, ["80 %", "of 4", "workers need more cores"]),
    ({"env": 80, "act": 12, "learn": 8}, {"cpu_share": 0.24, "cores": 16}, "env", 0.8, ["computes", "about 12 of 16"]),
    ({"env": 80, "act": 12, "learn": 8}, {}, "env", 0.8, ["more workers than cores help only if it waits"]),
    ({"env": 30, "act": 60, "learn": 10}, {}, "act", 0.6, ["60 %", "env.envs_per_worker", "smaller network"]),
    ({"env": 30, "learn": 70}, {}, "learner", 0.7, ["70 %", "ppo.minibatch_size", "ppo.epochs", "share the rows"]),
    ({"env": 30, "learn": 70}, {"share": False}, "learner", 0.7, ["as they only collect", "--engine ray"]),
    ({"learn": 80, "env": 20}, {"algo": "dqn"}, "learner", 0.8, ["collect meanwhile, for at most 1.2 times the speed"]),
    ({"learn": 70, "env": 30}, {"algo": "a2c"}, "learner", 0.7, ["a2c.rollout_steps"]),
    ({"learn": 70, "env": 30}, {"cpu_share": 0.9}, "learner", 0.7, ["more workers need more cores"]),
    ({"env": 49, "sync": 51}, {"workers": 16, "nodes": 4}, "sync", 0.51,
     ["over the network between 16 workers on 4 nodes", "fewer nodes"]),
    ({"env": 30, "learn": 20, "sync": 50}, {}, "sync", 0.5, ["4 workers on 1 node;", "fewer workers"]),
    ({"env": 40, "learn": 10, "idle": 50}, {"straggling": 0.45}, "stragglers", 0.45, ["45 %", "straggler_share"]),
    ({"env": 30, "learn": 20, "idle": 50}, {"straggling": 0.1}, "idle", 0.4, ["40 %", "ppo.rollout_steps"]),
    ({"env": 30, "learn": 20, "idle": 50}, {"straggling": 0.9}, "stragglers", 0.5, ["50 %"]),
    ({"env": 35, "act": 33, "learn": 32}, {"cpu_share": 0.5}, "balanced", 0.35,
     ["env 35 %, act 33 %, learn 32 %", "2 of 4"]),
    ({"start": 60, "env": 30, "eval": 10}, {}, "set-up", 0.6,
     ["70 % of all time", "set-up 60 %, evaluation 10 %", "itself is env-bound"]),
    ({"start": 10, "env": 30, "eval": 60}, {}, "evaluation", 0.6, ["70 % of all time", "eval.every_steps"]),
    ({"save": 60, "env": 40}, {}, "saving", 0.6, ["60 %", "checkpoint.every_seconds"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lane", "known", "bound", "share", "parts"), REPLICAS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_processes_that_collect_and_learn(
    lane: TimeSplit, known: dict[str, Any], bound: str, share: float, parts: list[str]
) -> None:
    found = judge(lane, **known)
    assert found.bound == bound and found.share == pytest.approx(share)
    assert [part for part in parts if part not in found.text] == []


WAITS: TimeSplit = {"learn": 25, "idle": 75}
ACTORS: list[tuple[TimeSplit, TimeSplit, dict[str, Any], str, float, list[str]]] = [
    ({"learn": 81, "sync": 9, "idle": 10}, {"env": 40, "idle": 60}, {}, "learner", 0.81,
     ["81 % of the learner's time is gradient steps; more actors will not help", "impala.batch_size", "parallel ppo"]),
    ({"learn": 20, "sync": 60, "idle": 20}, {"env": 40, "idle": 60}, {"nodes": 2}, "sync", 0.6,
     ["60 % of the learner's time", "faster link", "more actors will not help"]),
    ({"learn": 37, "sync": 27, "idle": 36}, {"env": 100}, {}, "balanced", 0.37, ["8 actors keep pace", "idle 36 %"]),
    (WAITS, {"env": 90, "act": 10}, {"cpu_share": 0.51}, "env", 0.9,
     ["waits for data 75 %", "90 % of the actors' time", "computes", "about 32 keep the learner busy"]),
    (WAITS, {"env": 90, "act": 10}, {"cpu_share": 0.95}, "env", 0.9, ["no core is free (of 16)"]),
    (WAITS, {"env": 90, "act": 10}, {}, "env", 0.9, ["only if it waits", "about 32 keep"]),
    (WAITS, {"env": 95, "act": 5}, {"cpu_share": 0.05}, "env-waiting", 0.95,
     ["mostly waits (CPU use 5 % of 16 cores)", "more actors than cores help: about 32 keep the learner busy"]),
    ({"learn": 4, "idle": 96}, {"env": 95, "act": 5}, {"cpu_share": 0.1}, "env-waiting", 0.95, ["about 80 until the"]),
    (WAITS, {"env": 10, "act": 90}, {}, "act", 0.9, ["90 % of the actors'", "about 32 keep"]),
    (WAITS, {"env": 30, "learn": 70}, {"algo": "a3c"}, "learner", 0.7,
     ["70 % of the actors' time is computing gradients", "about 32 keep"]),
    (WAITS, {"env": 40, "sync": 60}, {"nodes": 3}, "sync", 0.6, ["impala.rollout_steps", "faster link"]),
    (WAITS, {"env": 40, "idle": 60}, {}, "idle", 0.6, ["75 %", "60 %", "more actors will not help"]),
    (WAITS, {"env": 36, "act": 34, "sync": 30}, {}, "balanced", 0.36, ["env 36 %, act 34 %, sync 30 %"]),
    (WAITS, {}, {}, "idle", 0.75, ["75 %", "no actor has reported its time"]),
    ({"start": 70, "learn": 10, "idle": 20}, {"env": 20}, {}, "set-up", 0.7, ["70 %"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("learner", "actors", "known", "bound", "share", "parts"), ACTORS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_actors_and_a_learner(
    learner: TimeSplit, actors: TimeSplit, known: dict[str, Any], bound: str, share: float, parts: list[str]
) -> None:
    found = async_run(learner, actors, **known)
    assert found.bound == bound and found.share == pytest.approx(share)
    assert [part for part in parts if part not in found.text] == []


def test_a_simulator_that_sleeps_is_told_from_one_that_computes() -> None:
    lane = {"env": 90.0, "act": 6.0, "learn": 4.0}
    assert of_run(0.02, workers=2, cores=2, **lane).bound == "env-waiting"
    assert of_run(1.0, workers=1, cores=2, **lane).bound == "env"
    # Few workers on many cores use little of the CPU, and still compute.
    assert of_run(1.0, workers=2, cores=64, **lane).bound == "env"
    assert of_run(0.1, workers=2, cores=64, **lane).bound == "env-waiting"
    # Much else that computes does not hide that it sleeps.
    assert of_run(0.0, workers=2, cores=4, env=50, act=25, learn=25).bound == "env-waiting"
    # The same from actors, beside a learner that computes all the time it does not wait.
    actors = {"env": 80.0, "act": 20.0}
    for cpu_of_env, bound in ((0.0, "env-waiting"), (1.0, "env")):
        seconds = 4 * (80 * cpu_of_env + 20) + 40
        found = async_run({"learn": 40, "idle": 60}, actors, workers=4, cores=8, cpu_share=seconds / (8 * 100))
        assert found.bound == bound


@pytest.mark.parametrize(
    ("cpu", "waited", "bound"),
    [
        (2 * 100.0, 0.0, "env"),  # it computes all the time
        (2 * 20.0 + 2 * 20.0, 2 * 60.0, "env"),  # it computes whenever it gets a core
        (2 * 20.0 + 2 * 10.0, 0.0, "env-waiting"),
        (2 * 20.0 + 2 * 10.0, 2 * 10.0, "env-waiting"),  # it sleeps, although the machine is busy
    ],
)
def test_waiting_for_a_core_is_not_sleeping(cpu: float, waited: float, bound: str) -> None:
    lane = {"env": 80.0, "act": 15.0, "learn": 5.0}
    found = judge(lane, workers=2, cores=8, cpu_share=0.5, stepping=Usage(0, cpu, waited))
    assert found.bound == bound


def test_a_busy_machine_is_named() -> None:
    lane, used = {"env": 80.0, "act": 15.0, "learn": 5.0}, Usage(0, 100.0, 60.0)
    text = judge(lane, workers=2, cores=8, cpu_share=0.1, stepping=used, other_share=0.5).text
    assert text.endswith("; this machine is busy with other work: this run waited for a core 30 % of the time")
    for calm in ({"other_share": 0.05}, {"stepping": Usage(0, 100.0, 10.0)}, {"other_share": None}, {"stepping": None}):
        known = {"stepping": used, "other_share": 0.5} | calm
        assert "busy" not in judge(lane, workers=2, cores=8, cpu_share=0.1, **known).text


def test_how_many_workers_fill_the_cpu() -> None:
    """Twice the workers use twice the CPU: the advice, followed, leads to a full one."""
    found = of_run(0.0, workers=2, cores=2, env=95, act=5)
    assert "about 40 until the CPU is full" in found.text  # 5 % of the CPU with 2
    after = of_run(0.0, workers=40, cores=2, env=95, act=5)
    assert after.bound == "env" and "no core is free (of 2)" in after.text
    for nothing in (0.0, 1e-6):
        unsure = judge({"env": 100}, workers=2, cores=2, cpu_share=nothing)
        assert f"at least {2 * MAX_GROWTH} until" in unsure.text


def test_how_many_actors_keep_the_learner_busy() -> None:
    for workers, learn in ((8, 25.0), (3, 40.0), (1, 49.0)):
        found = async_run({"learn": learn, "idle": 100 - learn}, {"env": 100}, workers=workers)
        number = int(re.findall(r"about (\d+) keep", found.text)[0])
        assert number > workers and number * learn / workers == pytest.approx(100, rel=0.1)
    assert f"at least {8 * MAX_GROWTH} keep" in async_run({"learn": 1, "idle": 999}, {"env": 1}).text
    assert f"at least {8 * MAX_GROWTH} keep" in async_run({"idle": 1}, {"env": 1}).text


def test_a_large_net_and_a_slow_link() -> None:
    large = {"env": 2.0, "act": 9.0, "learn": 41.0, "sync": 8.0, "idle": 1.0}
    assert judge(large).bound == "learner"
    slow_link = large | {"sync": 70.0}
    found = judge(slow_link, nodes=2)
    assert found.bound == "sync" and "57 %" in found.text
    between = judge(large | {"sync": 30.0}, nodes=2)
    assert between.bound == "learner" and between.text.endswith("; also sync 36 %")


def test_waste_needs_less_than_work_to_be_named() -> None:
    even = (1 - WASTE_SHARE) / 4
    for waste, bound in (("sync", "sync"), ("idle", "idle")):
        rest = {part: even for part in ("env", "act", "learn", "sync", "idle") if part != waste}
        assert judge(rest | {waste: WASTE_SHARE}).bound == bound
        assert judge(rest | {waste: WASTE_SHARE - 0.01}).bound == "balanced"
    rest = {"act": (1 - WORK_SHARE) / 2, "learn": (1 - WORK_SHARE) / 2}
    assert judge(rest | {"env": WORK_SHARE}).bound == "env"
    assert judge(rest | {"env": WORK_SHARE - 0.01}).bound == "balanced"


def test_set_up_evaluation_and_saving_are_not_in_the_shares() -> None:
    lane = {"env": 60.0, "learn": 40.0}
    found = judge(lane | {"start": 40, "eval": 30, "save": 30})
    assert found == judge(lane) and found.share == 0.6
    assert judge(lane | {"start": 101}).bound == "set-up"


def test_any_input_gives_one_line() -> None:
    lanes: list[TimeSplit] = [
        {},
        {"env": 0.0},
        {"idle": 1.0},
        {"env": 1.0},
        {"start": 1.0},
        {"learn": 1e-300},
        {"env": -1.0, "act": math.nan, "learn": math.inf, "other": 5.0},
        dict.fromkeys(("start", "env", "act", "learn", "sync", "eval", "save", "idle"), 1.0),
    ]
    shares = [None, 0.0, 0.5, 1.0, 7.0, -1.0, math.nan]
    counts = [(0, 0, 0), (1, 1, 1), (1000, 64, 4096)]
    for main, actors, cpu, late, (workers, nodes, cores), algo in itertools.product(
        lanes, [None, *lanes], shares, [None, 0.0, 2.0, math.nan], counts, ["ppo", "a3c", "unheard-of"]
    ):
        found = verdict(
            main, actors, algo=algo, workers=workers, nodes=nodes, cpu_share=cpu, cores=cores, straggling=late
        )
        assert 0.0 <= found.share <= 1.0 + 1e-9
        assert "\n" not in found.text and "nan" not in found.text and "inf" not in found.text
        assert found.text.startswith((f"{found.bound}-bound: ", f"{found.bound}: "))
        percents = [int(number) for number in re.findall(r"(\d+) %", found.text)]
        assert found.bound == "unknown" or round(100 * found.share) in percents


OVERLAP = {"overlap": True}
GPU: list[tuple[TimeSplit, dict[str, Any], str, float, list[str]]] = [
    ({"env": 60, "act": 25, "learn": 15}, {}, "env", 0.6,
     ["on the CPU, while the GPU waits", "env.processes", "engine.overlap=true", "faster GPU will not help"]),
    ({"env": 60, "act": 25, "learn": 15}, OVERLAP | {"cpu_share": 0.95}, "env", 0.6,
     ["while the GPU learns and then waits", "no core is free (of 16), so more cores help"]),
    ({"env": 20, "act": 55, "learn": 25}, {}, "act", 0.55,
     ["55 % of the time is waiting for actions", "env.envs_per_worker", "ppo.rollout_steps", "engine.overlap=true"]),
    ({"env": 30, "act": 60, "learn": 10}, OVERLAP, "act", 0.6, ["round trip", "learning shares the GPU"]),
    ({"env": 20, "act": 20, "learn": 60}, {}, "learner", 0.6,
     ["60 % of the time is gradient steps on the GPU", "ppo.epochs", "engine.overlap=true"]),
    # Collecting took longer than the wait at its end, and yet it is the GPU that was busy all the time.
    ({"env": 40, "act": 30, "learn": 30}, OVERLAP, "learner", 0.3,
     ["takes longer than collecting, which waits for it 30 %", "environments will not help"]),
    ({"env": 39, "act": 38, "learn": 23}, OVERLAP, "balanced", 0.39, ["env 39 %, act 38 %, learn 23 %"]),
    ({"env": 35, "act": 35, "learn": 30}, {}, "balanced", 0.35, ["engine.overlap=true"]),
    ({"env": 35, "act": 35, "learn": 30}, {"algo": "impala"}, "balanced", 0.35, ["one part alone"]),
    ({"env": 20, "act": 20, "learn": 20, "idle": 40}, {}, "idle", 0.4, ["ppo.rollout_steps (fewer iterations)"]),
]  # fmt: skip


@pytest.mark.parametrize(("lane", "known", "bound", "share", "parts"), GPU)
def test_one_process_with_a_gpu(
    lane: TimeSplit, known: dict[str, Any], bound: str, share: float, parts: list[str]
) -> None:
    found = judge(lane, **({"workers": 1, "cores": 16, "cpu_share": 0.4, "device": "NVIDIA H200"} | known))
    assert found.bound == bound and found.share == pytest.approx(share)
    assert [part for part in parts if part not in found.text] == []
    assert "workers" not in found.text  # those of ppo learn on the CPU
    if known.get("overlap") or known.get("algo") == "impala":
        assert "engine.overlap" not in found.text


def test_a_learner_on_a_gpu_has_no_advice_for_a_cpu() -> None:
    found = async_run({"learn": 90, "idle": 10}, {"env": 50, "idle": 50}, device="NVIDIA H200")
    assert found.bound == "learner" and "on the GPU" in found.text and "data-parallel" not in found.text
    assert async_run(WAITS, {"env": 100}, device="NVIDIA H200") == async_run(WAITS, {"env": 100})


class VirtualTime:
    """Seconds that pass only where an environment or a network says so, however busy the machine is."""

    now = 0.0


class SlowImages(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(0, 255, (3, 16, 16), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, cost_seconds: float) -> None:
        self.cost_seconds = cost_seconds

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((3, 16, 16), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        VirtualTime.now += self.cost_seconds
        return np.zeros((3, 16, 16), np.uint8), 1.0, False, False, {}


class SlowNet(torch.nn.Module):
    def __init__(self, observation_shape: tuple[int, ...], num_outputs: int, cost_seconds: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(math.prod(observation_shape), num_outputs + 1)
        self.cost_seconds = cost_seconds

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_grad_enabled():
            VirtualTime.now += self.cost_seconds
        out = self.layer(images.flatten(1) / 255)
        return out[:, :-1], out[:, -1]


@pytest.mark.parametrize(
    ("env_seconds", "learn_seconds", "expected"),
    [
        (0.01, 0.1, "env-bound: 80 % of the time is the environments on the CPU"),
        (0.001, 0.1, "learner-bound: learning on the GPU takes longer"),
    ],
)
def test_runs_that_overlap(
    env_seconds: float, learn_seconds: float, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a run with a GPU does, on the CPU: the next rollout is collected while one is learned from."""
    monkeypatch.setattr(time, "perf_counter", lambda: VirtualTime.now)
    monkeypatch.setattr(gpu, "find_device", lambda *_: "cpu:0")
    tree = {
        "env": {"id": f"{__name__}:SlowImages", "kwargs": {"cost_seconds": env_seconds}, "envs_per_worker": 2},
        "model": {"class": f"{__name__}:SlowNet", "kwargs": {"cost_seconds": learn_seconds}},
        "ppo": {"rollout_steps": 16, "epochs": 1},
        "engine": {"overlap": True},
        "stop": {"iterations": 4},
        "out": str(tmp_path),
    }
    summary = paceline.train(tree, preset="none").summary
    assert summary["time_split"]["env"] == pytest.approx(5 * 16 * 2 * env_seconds)  # one rollout more than updates
    assert summary["time_split"]["learn"] == pytest.approx(4 * learn_seconds)
    assert summary["verdict"].startswith(expected) and "workers" not in summary["verdict"]


def test_nothing_measured() -> None:
    assert judge({}) == Verdict("unknown", 0.0, "unknown: no time has been measured yet")
