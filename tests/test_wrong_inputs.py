"""What users get wrong: exit code 2 and one line that names it and says what to do; nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.envs import catalog

FILES = {
    "envs.py": """
        import gymnasium
        import numpy as np
        from gymnasium import spaces

        class Fine(gymnasium.Env):
            observation_space = spaces.Box(-1, 1, (3,), np.float32)
            action_space = spaces.Discrete(2)

            def reset(self, *, seed=None, options=None):
                return np.zeros(3, np.float32), {}

            def step(self, action):
                return np.zeros(3, np.float32), 0.0, True, False, {}

        class Raises(Fine):
            def __init__(self):
                raise RuntimeError("no licence\\nfor this simulator")

        class TextSeen(Fine):
            observation_space = spaces.Text(5)

        class GraphDone(Fine):
            action_space = spaces.Graph(spaces.Discrete(2), None)

        WORDS = spaces.Sequence(spaces.Discrete(9))

        class Mission(Fine):
            observation_space = spaces.Dict(
                {"image": spaces.Box(0, 255, (9, 9, 3), np.uint8), "mission": WORDS, "way": spaces.Discrete(4)}
            )

        class NoSpaces(gymnasium.Env):
            pass

        class NoActions(Fine):
            action_space = spaces.Box(-1, 1, (0,))

        class TooManyActions(Fine):
            action_space = spaces.Discrete(2_000_000_000)

        class TooMuchSeen(Fine):
            observation_space = spaces.Discrete(2_000_000_000)

        class TwoReadings(Fine):
            observation_space = spaces.Box(0, 255, (8, 16, 16), np.uint8)

        class OldReset(Fine):
            def reset(self):
                return np.zeros(3, np.float32)

        class OldObservation(Fine):
            def reset(self, *, seed=None, options=None):
                return np.zeros(3, np.float32)

        class TwoNumbers(Fine):
            observation_space = spaces.Box(-1, 1, (2,), np.float32)

            def reset(self, *, seed=None, options=None):
                return np.zeros(2, np.float32)

        class OldStep(Fine):
            def step(self, action):
                return np.zeros(3, np.float32), 0.0, True, {}

        class OldClass:
            observation_space, action_space = Fine.observation_space, Fine.action_space
            reset, step = OldReset.reset, OldStep.step

        class Narrow(Fine):
            def reset(self, *, seed=None, options=None):
                return np.zeros(1, np.float32), {}

        class NarrowLater(Fine):
            def step(self, action):
                return np.float32(0), 0.0, True, False, {}

        class WideLater(Fine):
            def step(self, action):
                return np.zeros(4, np.float32), 0.0, True, False, {}

        class NoReward(Fine):
            def step(self, action):
                return np.zeros(3, np.float32), None, True, False, {}

        class WrongKeys(Fine):
            observation_space = spaces.Dict({"a": Fine.observation_space, "b": spaces.Discrete(2)})

            def reset(self, *, seed=None, options=None):
                return {"a": np.zeros(3, np.float32)}, {}

        class OutOfRange(Fine):
            observation_space = spaces.Discrete(3)

            def reset(self, *, seed=None, options=None):
                return 7, {}

        class MetricsList(Fine):
            def step(self, action):
                return np.zeros(3, np.float32), 0.0, True, False, {"metrics": [1.0]}

        class MetricsText(Fine):
            def step(self, action):
                return np.zeros(3, np.float32), 0.0, True, False, {"metrics": {"speed": "fast"}}

        Zoo = type("Zoo", (), {"__module__": "pettingzoo.utils.env", "possible_agents": ["a", "b"]})

        def number():
            return 5
        """,
    "nets.py": """
        import torch

        class Net(torch.nn.Module):
            def __init__(self, shape, outputs, fault=""):
                super().__init__()
                if fault == "raise":
                    raise ValueError("two\\nlines")
                self.policy, self.value = torch.nn.Linear(shape[0], outputs), torch.nn.Linear(shape[0], 1)
                self.fault = fault

            def forward(self, x):
                values = {"shape": self.value(x), "number": 1.0}
                return self.policy(x), values.get(self.fault, self.value(x)[:, 0])

        class NoModule(Net):
            __new__ = lambda cls, shape, outputs: lambda x: (torch.zeros(2, outputs), torch.zeros(2))
        """,
    "broken.py": "class Env:\n    def reset(self:\n",
    "raises.py": "raise OSError('the simulator\\nis not here')\n",
    "bad.yaml": "ppo: {gamma: 0.9\nseed: 3\n",
    "list.yaml": "- algo: ppo\n- seed: 1\n",
    "section.yaml": "stop: 100000\n",
    "misspelt.yaml": "seed: 1\nchekpoint: {keep: 2}\n",
    "binary.yaml": "\0\1\2",
    "recursive.yaml": "env: {kwargs: &a {again: *a}}\n",
    "bomb.yaml": "env:\n  kwargs:\n    a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
    "deep.yaml": "env: {kwargs: {a: " + "[" * 2000 + "]" * 2000 + "}}\n",
    "date.yaml": "seed: 2024-99-99\n",
    "keys.yaml": "1: 2\n",
    "twice.yaml": "workers: [1, 1]\niterations: 1\n",
}

# Arguments, and the words that the line must have. {runs} holds the runs of the fixture below; {out} does not exist.
TRAIN: list[tuple[str, str]] = [
    ("--set ppo.gama=0.9", "'ppo.gama' did you mean 'ppo.gamma'"),
    ("--set pppo.gamma=0.9", "'pppo' did you mean 'ppo'"),
    ("--set gamma=0.9", "'gamma' 'ppo.gamma'"),
    ("--set env.zzz=1", "'env.zzz' allowed in env: id, kwargs"),
    ("--algo pp0", "algo=pp0 ppo, a2c 'ppo'"),
    ("--algo sac", "--algo sac continuous actions Discrete(2) use dqn or ppo"),
    ("--algo ddpg", "algo=ddpg ppo, a2c"),
    ("--engine slurm", "engine.name=slurm auto, local"),
    ("--workers 2 --engine local", "engine.workers=2 one process env.vector=async"),
    ("--total-steps -5", "stop.total_steps=-5 greater than or equal to 1"),
    ("--total-steps 0", "stop.total_steps=0 greater than or equal to 1"),
    ("--total-steps many", "stop.total_steps=many integer"),
    ("--iterations 1.5", "stop.iterations=1.5 integer"),
    ("--max-time soon", "stop.max_time=soon 90s 1h30m"),
    ("--max-time 1.2.3s", "stop.max_time=1.2.3s"),
    ("--max-time 0", "stop.max_time=0 greater than 0"),
    ("--stop-return high", "stop.return_mean=high number"),
    ("--stop-return nan", "stop.return_mean=nan finite"),
    ("--seed -1", "seed=-1 greater than or equal to 0"),
    ("--seed nan", "seed=nan"),
    ("--envs-per-worker -1", "env.envs_per_worker=-1"),
    ("--set ppo.gamma=1.5", "ppo.gamma=1.5 less than or equal to 1"),
    ("--set ppo.gamma=.nan", "ppo.gamma=nan"),
    ("--set ppo.learning_rate=0", "ppo.learning_rate=0 greater than 0"),
    ("--set model.hidden=64", "model.hidden=64 list"),
    ("--set stop.metric=entropy", "stop.metric='entropy' NAME>=NUMBER"),
    ("--set stop.metric=entropy>=.", "stop.metric='entropy>=.' NAME>=NUMBER"),
    ("--set stop.metric=entrpy<1", "stop.metric=entrpy<1 'entropy' env/"),
    ("--set ppo.gamma", "'ppo.gamma' KEY=VALUE"),
    ("--set =1", "'=1' KEY=VALUE"),
    ("--set ppo.gamma=[1", "'ppo.gamma=[1' not YAML"),
    ("--set ppo=5", "ppo=5 ppo.rollout_steps"),
    ("--set stop=100000", "stop=100000 stop.total_steps"),
    ("--set ppo.minibatch_size=5000", "ppo.minibatch_size=5000 env.envs_per_worker ppo.rollout_steps 1024"),
    ("--set a2c.gamma=0.9", "a2c.gamma --algo a2c --algo ppo"),
    ("--algo a2c --set ppo.clip=0.1", "ppo.clip --algo ppo --algo a2c"),
    ("--set env.processes=2", "env.processes=2 env.vector=async"),
    ("--preset Cartpole", "'Cartpole' did you mean 'CartPole-v1' none"),
    ("--config {here}/nowhere.yaml", "nowhere.yaml no such file"),
    ("--config {here}", "{here} directory YAML file"),
    ("--config {here}/bad.yaml", "bad.yaml line not YAML"),
    ("--config {here}/binary.yaml", "binary.yaml not YAML"),
    ("--config {here}/list.yaml", "list.yaml mapping list"),
    ("--config {here}/section.yaml", "stop=100000 stop.total_steps"),
    ("--config {here}/misspelt.yaml", "'chekpoint' 'checkpoint'"),
    ("--env CartPol-v1", "env.id=CartPol-v1 did you mean CartPole-v1"),
    ("--env zzzzqqq-v3", "env.id=zzzzqqq-v3 paceline envs"),
    ("--env {here}/nowhere.py:Env", "nowhere.py no such file"),
    ("--env {here}/envs.py:Fin", "envs.py:Fin it has no 'Fin' Fine"),
    ("--env {here}/broken.py:Env", "broken.py line 2 SyntaxError"),
    ("--env {here}/raises.py:Env", "raises.py OSError the simulator is not here"),
    ("--env {here}/envs.py:Raises", "envs.py:Raises RuntimeError no licence for this simulator"),
    ("--env {here}/envs.py:TextSeen", "observation space only Text numbers MultiDiscrete"),
    ("--env {here}/envs.py:GraphDone", "action space Graph Discrete, MultiDiscrete"),
    ("--env {here}/envs.py:NoSpaces", "envs.py:NoSpaces observation_space __init__"),
    ("--env {here}/envs.py:number", "envs.py:number int gymnasium.Env"),
    ("--env {here}/envs.py:Mission", "['mission'] Sequence FilterObservation: {{filter_keys: [image, way]}}"),
    ("--env {here}/envs.py:NoActions", "action space empty"),
    ("--env {here}/envs.py:TooManyActions", "2,000,000,000 output 1,000,000 Box"),
    ("--env {here}/envs.py:TooMuchSeen", "2,000,000,000 input 1,000,000 Box"),
    ("--env {here}/envs.py:TwoReadings", "(8, 16, 16) env.channels=last env.channels=first"),
    ("--env {here}/envs.py:TwoReadings --set env.channels=middle", "env.channels=middle first last"),
    ("--env paceline/ImageSide-v0 --set env.channels=first", "env.channels=first last"),
    ("--set env.channels=last", "env.channels=last images"),
    ("--env {here}/envs.py:OldReset", "reset seed old gym API gymnasium.Env"),
    ("--env {here}/envs.py:OldObservation", "reset (observation, info dict) old gym API"),
    ("--env {here}/envs.py:TwoNumbers", "reset (observation, info dict) old gym API"),
    ("--env {here}/envs.py:OldClass", "OldClass gymnasium.Env old gym API"),
    ("--env {here}/envs.py:Narrow", "reset shape (1,) (3,)"),
    ("--env {here}/envs.py:WrongKeys", "keys ['a'] ['a', 'b']"),
    ("--env {here}/envs.py:OutOfRange", "7 Discrete(3)"),
    ("--env {here}/envs.py:Zoo", "env.id a has no observation_space"),
    ("--env MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-5x5-v0 minigrid:MiniGrid-Empty-5x5-v0"),
    ("--set env.wrappers=[NormalizeObservation]", "NormalizeObservation env.normalize_observation=true"),
    ("--set env.wrappers=[{{NormalizeReward: {{gamma: 0.9}}}}]", "NormalizeReward env.normalize_reward=true"),
    ("--env nowhere.at.all:Env", "'nowhere.at.all' installed"),
    ("--env :Env", "env.id=:Env module:Name file.py:Name"),
    ("--set env.kwargs={{nope: 1}}", "CartPole-v1 'nope'"),
    ("--env Pendulum-v1 --set env.kwargs={{nope: 1}}", "Pendulum-v1 'nope'"),
    ("--set env.wrappers=[ClipRewards]", "env.wrappers=ClipRewards ClipReward"),
    ("--set env.wrappers=[{{ClipReward: {{}}, NormalizeReward: {{}}}}]", "env.wrappers one name per entry"),
    ("--set env.wrappers=[{{}}]", "env.wrappers one name per entry"),
    ("--set env.wrappers=[{{ClipReward: {{limit: 1}}}}]", "could not be made 'limit'"),
    ("--set env.wrappers=[{here}/envs.py:Wrapper]", "env.wrappers envs.py it has no 'Wrapper'"),
    ("--set model.class={here}/nets.py:Nett", "model.class nets.py:Nett it has no 'Nett' Net"),
    ("--set model.class={here}/nowhere.py:Net", "model.class nowhere.py no such file"),
    ("--set model.class=Net", "model.class=Net module:Name file.py:Name"),
    ("--set model.class={here}/nets.py:NoModule", "model.class torch.nn.Module"),
    ("--set model.class={here}/nets.py:Net --set model.kwargs={{fault: shape}}", "values [B] [2, 1]"),
    ("--set model.class={here}/nets.py:Net --set model.kwargs={{fault: number}}", "values [B] a float"),
    ("--set model.class={here}/nets.py:Net --set model.kwargs={{fault: raise}}", "ValueError: two lines"),
    ("--set model.kwargs={{fault: raise}}", "model.kwargs needs model.class"),
    ("--set model.squash=true", "model.squash continuous Discrete(2)"),
    ("--set model.cnn=nature", "model.cnn=nature images"),
    ("--env paceline/ImageSide-v0 --set env.normalize_observation=true", "env.normalize_observation=true images"),
    ("--env paceline/Identity-v0 --set env.kwargs={{space: ball}}", "space='ball' box"),
    ("--name a/b", "name=a/b"),
    ("--name ..", "--name '..' letters, digits"),
    ("--out {here}/list.yaml", "list.yaml cannot make --out"),
    ("--out /proc/paceline", "/proc/paceline cannot make --out"),
    ("--resume {out}/none", "no run at {out}/none"),
    ("--resume auto", "--resume auto needs --name"),
    ("--resume {runs}", "{runs} folder of runs {runs}/cartpole"),
    ("--resume {runs}/cartpole --env Acrobot-v1", "env.id=Acrobot-v1 CartPole-v1 --init-from"),
    ("--resume {runs}/cartpole --algo a2c", "algo=a2c ppo --init-from"),
    ("--resume {runs}/cartpole --seed 7", "seed=7 {runs}/cartpole has 3"),
    ("--resume {runs}/cartpole --set ppo.gama=1", "'ppo.gama' 'ppo.gamma'"),
    ("--resume {runs}/cartpole --set a2c.gamma=0.5", "a2c.gamma=0.5 differs"),
    ("--resume {runs}/cartpole --set stop=5", "stop=5 stop.total_steps"),
    ("--resume {runs}/cartpole --threads many", "engine.threads=many integer"),
    ("--resume {runs}/cartpole --init-from {runs}/cartpole", "--resume --init-from give one"),
    ("--resume {runs}/cartpole --preset CartPole-v1", "--preset CartPole-v1 new run"),
    ("--resume {runs}/cartpole/checkpoints/step-7", "no checkpoint 'step-7'"),
    ("--init-from {out}/none", "no run at {out}/none"),
    ("--init-from {runs}/pendulum", "another network log_std same"),
    ("--init-from {runs}/cartpole --set model.hidden=[32,32]", "another network same"),
    ("--resume {runs}/cartpole --name other", "--name other {runs}/cartpole leave out --name"),
    ("--resume {runs}/cartpole --out {out}", "--out {out} {runs}/cartpole leave out --out"),
    ("--resume {runs}/cartpole --set preset=CartPole-v1", "--preset CartPole-v1 leave out"),
    ("--config {here}/recursive.yaml", "recursive.yaml alias part of"),
    ("--config {here}/bomb.yaml", "bomb.yaml 1,000,000 values aliases"),
    ("--config {here}/deep.yaml", "deep.yaml nested 100 deep"),
    ("--config {here}/date.yaml", "date.yaml not YAML month"),
    ("--config {here}/keys.yaml", "keys.yaml key 1 text"),
    ("--config /dev/zero", "/dev/zero larger than 10 MB"),
    ("--set env.kwargs={{a: &x [*x]}}", "env.kwargs alias part of"),
    ("--set ppo.gamma=true", "ppo.gamma=true expected a number"),
    ("--set model.hidden=[true]", "model.hidden=[True] expected a number"),
    ("--set seed=false", "seed=false expected a number"),
    ("--set model.hidden=[100000000,100000000]", "model.hidden GB of memory lower it"),
    ("--set ppo.rollout_steps=1e30", "ppo.rollout_steps=1 less than or equal to"),
    ("--set ppo.rollout_steps=1e15", "ppo.rollout_steps GB of memory lower it"),
    ("--set env.envs_per_worker=1e15", "GB of memory lower it"),
    ("--set env.frame_stack=1e15", "GB of memory lower it"),
    ("--algo dqn --set dqn.replay_size=1e15", "dqn.replay_size GB of memory lower it"),
    ("--algo impala --set impala.batch_size=1e15", "impala.batch_size GB of memory lower it"),
    ("--set stop.return_window=1e30", "stop.return_window less than or equal to"),
    ("--set ppo.epochs=1e30", "ppo.epochs less than or equal to"),
    ("--set ppo.epochs=1e6", "ppo.epochs=1000000 less than or equal to 10000"),
    ("--threads 1e6", "engine.threads=1e6 less than or equal to 1024"),
    ("--max-time inf", "stop.max_time=inf 90s 1h30m"),
    ("--stepz 5", "--stepz --help"),
    ("--lr 0.1", "--lr 0.1 did you mean --set ppo.learning_rate=0.1? (see paceline train --help)"),
    ("--algo dqn --lr=0.1", "--lr=0.1 did you mean --set dqn.learning_rate=0.1?"),
    ("--timesteps 1000", "--timesteps 1000 did you mean --total-steps 1000?"),
    ("--algo dqn --buffer-size 1", "did you mean --set dqn.replay_size=1?"),
    ("--gpu", "--gpu did you mean --device?"),
    ("--device gpu", "engine.device=gpu did you mean 'cuda'"),
    ("CartPole-v1", "CartPole-v1 did you mean --env CartPole-v1?"),
    ("ppo", "ppo did you mean --algo ppo?"),
    ("--set lr=0.1", "'lr' did you mean 'ppo.learning_rate'?"),
    ("--set timesteps=9", "'timesteps' did you mean 'stop.total_steps'?"),
    ("--set ppo.batch_size=9", "'ppo.batch_size' did you mean 'ppo.minibatch_size'?"),
    ("--algo a2c --set gamma=0.9", "'gamma' did you mean 'a2c.gamma'?"),
    ("--seed", "--seed expected one argument"),
]
# What only steps show, when the run has begun and told so.
STEPS: list[tuple[str, str]] = [
    ("--env {here}/envs.py:OldStep", "step truncated tuple of 4 old gym API"),
    ("--env {here}/envs.py:OldStep --set env.vector=async", "step truncated tuple of 4 old gym API"),
    ("--env {here}/envs.py:NarrowLater", "step shape () (3,)"),
    ("--env {here}/envs.py:WideLater", "step shape (4,) (3,)"),
    ("--env {here}/envs.py:NoReward", "step None reward number"),
    ("--env {here}/envs.py:MetricsList", 'info["metrics"] dict list'),
    ("--env {here}/envs.py:MetricsText", "info[\"metrics\"]['speed'] number str"),
]
OTHERS: list[tuple[str, str]] = [
    ("trian", "no verb 'trian' did you mean 'train' --help"),
    ("zzz", "no verb 'zzz' train, evaluate --help"),
    ("enjoy {runs}/cartpole", "no verb 'enjoy' did you mean 'evaluate'"),
    ("bench scalling", "no verb 'scalling' did you mean 'scaling' paceline bench --help"),
    ("evaluate {runs}/cartpole --epsodes 3", "--epsodes 3 did you mean --episodes"),
    ("evaluate {runs}/cartpole --zzz", "unrecognized arguments: --zzz (see paceline evaluate --help)"),
    ("evaluate", "RUN|CHECKPOINT required"),
    ("evaluate {out}/none", "no run at {out}/none"),
    ("evaluate {runs}/cartpol", "did you mean {runs}/cartpole"),
    ("evaluate {runs}", "folder of runs {runs}/cartpole"),
    ("evaluate {here}/empty", "empty not a run directory config.yaml"),
    ("evaluate {here}/list.yaml", "list.yaml is a file"),
    ("evaluate {runs}/cartpole --checkpoint 77", "no checkpoint '77' last, 0"),
    ("evaluate {runs}/cartpole --checkpoint best", "no checkpoint 'best' last, 0"),
    ("evaluate {runs}/cartpole/checkpoints/step-77", "no checkpoint 'step-77' last, 0"),
    ("evaluate {runs}/cartpole --episodes 0", "--episodes 0 at least 1"),
    ("evaluate {runs}/cartpole --episodes two", "--episodes 'two'"),
    ("evaluate {runs}/cartpole --seed -1", "--seed -1 at least 0"),
    ("evaluate {runs}/cartpole --video {out}.avi", "{out}.avi .mp4 or .gif"),
    ("evaluate {runs}/cartpole --video {out}/a.mp4", "--video no folder {out}"),
    ("evaluate {runs}/cartpole --video {here}/a.mp4 --episodes 0", "--episodes 0 at least 1"),
    ("evaluate {runs}/cartpole --video {here}/a.mp4 --random", "--random"),
    ("evaluate {runs}/probe --video {here}/a.mp4", "render_mode"),
    ("plot {out}/none -o {out}.png", "{out}/none no such run"),
    ("plot {runs}/cartpole -o {out}.jpeg", "{out}.jpeg .png, .svg or .pdf"),
    ("plot {runs}/cartpole -o {out}.png --smooth 0", "--smooth 0 at least 1"),
    ("plot {runs}/cartpole -o {here}/list.yaml/a.png", "-o cannot be written"),
    ("plot {runs}/cartpole", "-o/--output required"),
    ("submit --on slurm --walltime inf -- true", "walltime=inf 90s 1h30m"),
    ("submit --on slurm --seeds 0-999999 --dry-run -- true", "--seeds 0-999999 at most 1,000"),
    ("submit --on slurm --profile {here}/bomb.yaml --dry-run -- true", "bomb.yaml 1,000,000 values aliases"),
    ("cluster up {here}/deep.yaml", "deep.yaml nested 100 deep"),
    ("launch --port 99999 --rehearse 1 -- true", "--port 99999 at most 65535"),
    ("launch --timeout nan --rehearse 1 -- true", "--timeout nan finite"),
    ("compare /proc", "/proc 10,000 folders"),
    ("compare {runs} --threshold nan", "--threshold nan finite"),
    ("tune --env CartPole-v1 --space {here}/list.yaml --gpus nan", "--gpus nan finite"),
    ("bench suite --suite classic --algos ppo,ppo", "--algos ppo,ppo ppo is given twice"),
    ("bench suite --suite classic --games CartPole,CartPole", "--games CartPole,CartPole given twice"),
    ("bench suite --suite classic --seeds 1000000", "--seeds 1000000 at most 1,000"),
    ("bench scaling --workers 1,1 --iterations 1", "--workers 1,1 1 is given twice"),
    ("bench scaling --study {here}/twice.yaml", "workers 1,1 given twice"),
    ("bench throughput --env Nope-v0", "env.id=Nope-v0 no such environment"),
    ("envs chek", "'chek' 'check'"),
    ("envs check", "envs check CartPole-v1"),
    ("envs check CartPool-v1", "CartPool-v1 CartPole-v1"),
    ("envs check {here}/nowhere.py:Env", "nowhere.py no such file"),
    ("envs check CartPole-v1 --set env.idd=x", "'env.idd' 'env.id'"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    here = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (here / name).write_text(textwrap.dedent(text))
    (here / "empty").mkdir()
    for name, env in (("cartpole", "CartPole-v1"), ("pendulum", "Pendulum-v1"), ("probe", "paceline/Identity-v0")):
        tree = {"env": env, "name": name, "out": str(here / "runs"), "seed": 3, "stop": {"iterations": 1}}
        paceline.train(tree, preset="none")
    yield here


def listing(folder: Path) -> dict[str, Any]:
    """Every file, with its content."""
    return {
        str(p): p.read_bytes() if p.is_file() else "" for p in sorted(folder.rglob("*")) if "__pycache__" not in p.parts
    }


def refused(result: Any, words: str, *, began: bool = False) -> None:
    lines = [line for line in result.err.splitlines() if line.strip()]
    assert result.code == 2, result
    assert len(lines) == 1 and lines[0].startswith("paceline: "), result.err
    assert "Traceback" not in result.err
    missing = [part for part in words.split() if part not in lines[0]]
    assert not missing, f"{missing} not in: {lines[0]}"
    assert began == result.out.startswith("run ") and (began or result.out == "")


def split(line: str, world: Path, out: Path) -> list[str]:
    """At spaces, but not within braces and brackets."""
    words: list[str] = []
    depth = 0
    for word in line.format(here=world, runs=world / "runs", out=out).split(" "):
        if depth:
            words[-1] += " " + word
        else:
            words.append(word)
        depth += sum(word.count(c) for c in "{[") - sum(word.count(c) for c in "}]")
        depth = max(0, depth) if words[-1] != "ppo.gamma=[1" else 0
    return words


def filled(words: str, world: Path, out: Path) -> str:
    return words.format(here=world, runs=world / "runs", out=out)


@pytest.mark.parametrize(("line", "words"), TRAIN, ids=[line for line, _ in TRAIN])
def test_train(line: str, words: str, world: Path, here: Path, cli: Callable[..., Any]) -> None:
    out, before = here / "out", listing(world)
    given = split(line, world, out)
    extra = [] if "--preset" in given else ["--preset", "none"]
    extra += (
        [] if any(word in line for word in ("stop", "section", "--iterations", "--total")) else ["--iterations", "1"]
    )
    extra += [] if "--out" in given or "--resume" in given else ["--out", str(out)]
    refused(cli("train", *given, *extra), filled(words, world, out))
    assert not list(here.iterdir()), "something was written"
    assert listing(world) == before


@pytest.mark.parametrize(("line", "words"), STEPS, ids=[line for line, _ in STEPS])
def test_what_only_steps_show(line: str, words: str, world: Path, here: Path, cli: Callable[..., Any]) -> None:
    before = listing(world)
    given = split(line, world, here)
    result = cli("train", *given, "--preset", "none", "--iterations", 1, "--out", here / "out")
    refused(result, filled(words, world, here), began=True)
    assert not list(here.iterdir()), "something was left"
    assert listing(world) == before


@pytest.mark.parametrize(("line", "words"), OTHERS, ids=[line for line, _ in OTHERS])
def test_other_verbs(line: str, words: str, world: Path, here: Path, cli: Callable[..., Any]) -> None:
    out, before = here / "out", listing(world)
    refused(cli(*split(line, world, out)), filled(words, world, out))
    assert not list(here.iterdir()), "something was written"
    assert listing(world) == before


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train", "--config", ""], "--config ''"),
        (["train", "--name", ""], "--name ''"),
        (["train", "--set", ""], "--set ''"),
        (["compare", ""], "RUN|DIR ''"),
        (["bench", "suite", "--suite", "classic", "--out", ""], "--out ''"),
    ],
)
def test_an_empty_value(words: list[str], name: str, here: Path, cli: Callable[..., Any]) -> None:
    """`--config "$FILE"` with an unset variable would train with the defaults."""
    refused(cli(*words), f"{name}: the value is empty")
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("env", "package", "extra"),
    [
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("PongNoFrameskip-v4", "ale_py", "atari"),
        ("Ant-v5", "mujoco", "mujoco"),
        ("LunarLander-v3", "Box2D", "box2d"),
        ("coinrun", "envpool", "procgen"),
    ],
)
def test_an_env_whose_package_is_missing(
    env: str, package: str, extra: str, here: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    really = catalog.is_installed  # where it is installed, as if it were not
    monkeypatch.setattr(catalog, "is_installed", lambda name: name != package and really(name))
    words = f'{env} {package} "paceline[{extra}]"'
    refused(cli("train", "--env", env, "--iterations", 1), words)
    refused(cli("envs", "check", env), words)
    assert not list(here.iterdir())


def test_a_name_that_is_taken(world: Path, here: Path, cli: Callable[..., Any]) -> None:
    before = listing(world)
    refused(cli("train", "--out", world / "runs", "--name", "cartpole"), "cartpole exists --name --resume")
    refused(cli("train", "--out", world, "--name", "empty", "--algo", "x"), "algo=x")
    (here / "full").mkdir()
    (here / "full" / "thesis.txt").write_text("mine")
    refused(cli("train", "--out", here, "--name", "full"), "full not empty --name")
    refused(cli("train", "--out", here, "--name", "full", "--resume", "auto"), "full config.yaml")
    assert listing(here) == {str(here / "full"): "", str(here / "full" / "thesis.txt"): b"mine"}
    assert listing(world) == before


@pytest.mark.parametrize("file", ["arrays.safetensors", "state.json"])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_checkpoint_cut_short(file: str, keep: float, world: Path, here: Path, cli: Callable[..., Any]) -> None:
    run = here / "run"
    shutil.copytree(world / "runs" / "cartpole", run, symlinks=True)
    path = run / "checkpoints" / "last" / file
    size = path.stat().st_size
    os.truncate(path, int(size * keep))
    before = listing(run)
    name = str((run / "checkpoints" / "last").readlink())
    refused(cli("evaluate", run), f"{name} cannot be loaded {file} step-0 loads")
    refused(cli("train", "--resume", run, "--iterations", 5), f"{name} cannot be loaded {file}")
    refused(cli("train", "--init-from", run, "--out", here / "new"), f"{name} cannot be loaded {file}")
    assert listing(run) == before and not (here / "new").exists()
    assert cli("evaluate", run, "--checkpoint", 0, "--episodes", 1).code == 0


def test_a_flipped_bit_and_a_foreign_checkpoint(world: Path, here: Path, cli: Callable[..., Any]) -> None:
    run = here / "run"
    shutil.copytree(world / "runs" / "cartpole", run, symlinks=True)
    path = run / "checkpoints" / "last" / "arrays.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    refused(cli("evaluate", run), "arrays.safetensors checksum")
    state = run / "checkpoints" / "step-0" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "format": 99}))
    refused(cli("evaluate", run, "--checkpoint", 0), "format 99 reads format 1")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train --env CartPol-v1", "env.id=CartPol-v1 CartPole-v1"),
        ("train --set ppo.gama=1", "'ppo.gama' 'ppo.gamma'"),
        ("train --set env.kwargs={nope:1}", "CartPole-v1 'nope:1'"),
        ("evaluate nowhere", "nowhere"),
    ],
)
def test_the_real_command(line: str, words: str, here: Path, command: Callable[..., Any]) -> None:
    refused(command(*line.split()), words)
    assert not list(here.iterdir())


def test_a_run_in_use(world: Path, here: Path, cli: Callable[..., Any], start: Callable[..., Any]) -> None:
    slow = start("train", "--env", "paceline/FixedCost-v0", "--name", "busy", "--max-time", 60)
    wait_for(slow, "Iteration 1 ")
    refused(cli("train", "--resume", "runs/busy"), f"runs/busy in use by process {slow.pid}")
    refused(cli("train", "--resume", "auto", "--name", "busy"), f"runs/busy in use by process {slow.pid}")


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"it ended without {text!r}: {process.communicate()}")
