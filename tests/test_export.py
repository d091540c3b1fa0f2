from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from gymnasium import spaces

import paceline
from paceline import export as exporting
from paceline.spaces import space_to_json

ROOT = Path(__file__).parents[1]
SHOWN = f"{ROOT}/tests/odd_envs.py:Shown"
Cli = Callable[..., Any]
CARTPOLE = {"env": {"id": "CartPole-v1", "normalize_observation": True, "normalize_reward": False}}


def shown(observation: spaces.Space[Any], action: spaces.Space[Any]) -> dict[str, Any]:
    return {"id": SHOWN, "kwargs": {"observation": space_to_json(observation), "action": space_to_json(action)}}


PIXELS = spaces.Box(0, 255, (36, 40, 3), np.uint8)
RUNS: dict[str, dict[str, Any]] = {
    "cartpole": CARTPOLE,
    "grid": {"env": {"id": f"{ROOT}/examples/grid_world.py:GridWorld", "max_episode_steps": 20}},
    "reactor": {"env": f"{ROOT}/examples/reactor.py:Reactor", "model": {"squash": True}},
    "impala": {"env": shown(PIXELS, spaces.MultiDiscrete([2, 3])), "model": {"cnn": "impala", "cnn_width": 0.25}},
    "nature": {
        "algo": "dqn",
        "env": shown(PIXELS, spaces.Discrete(3, start=1)),
        "dqn": {"dueling": True, "exploration": "noisy", "learning_starts": 8},
    },
    "own": {"env": "CartPole-v1", "model": {"class": f"{ROOT}/examples/network.py:ResidualNet"}},
}


def train(out: Path, name: str, tree: dict[str, Any]) -> Path:
    algo = tree.get("algo", "ppo")
    few = {"rollout_steps": 8} | ({} if algo == "dqn" else {"minibatch_size": 16})
    env = tree["env"] if isinstance(tree["env"], dict) else {"id": tree["env"]}
    tree = tree | {"env": {"envs_per_worker": 2} | env, algo: few | tree.get(algo, {}), "stop": {"iterations": 2}}
    tree |= {"name": name, "out": str(out), "engine": {"threads": 1}}  # two wait for each other where others run, too
    return paceline.train(tree, preset="none", quiet=True).path


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), "cartpole", CARTPOLE)


@pytest.mark.parametrize("name", RUNS)
def test_the_file_acts_as_the_agent_does(name: str, here: Path, cli: Cli) -> None:
    run = train(here, name, RUNS[name])
    result = cli("export", run)
    assert result.code == 0 and result.err == "", result.err
    assert "on 64 observations of the environment: the same actions" in result.out
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(run / "policy.onnx", options)
    agent = paceline.load(run)
    env = agent.make_env()
    observation, _ = env.reset(seed=7)
    inputs = {port.name: np.dtype(port.type[7:-1].replace("float", "float32")) for port in session.get_inputs()}
    for _ in range(20):
        parts = observation if isinstance(observation, dict) else {"": observation}
        feed = {f"observation.{key}".rstrip("."): np.asarray(value)[None] for key, value in parts.items()}
        (action,) = session.run(["action"], {k: array.astype(inputs[k], casting="safe") for k, array in feed.items()})
        np.testing.assert_allclose(action[0], agent.act(observation), rtol=1e-5)
        observation, _, terminated, truncated, _ = env.step(action[0])
        if terminated or truncated:
            observation, _ = env.reset()


def test_it_says_what_it_is_and_nothing_of_this_machine(here: Path, cli: Cli) -> None:
    run = train(here, "grid", RUNS["grid"])
    assert cli("export", run, "--format", "onnx", "--checkpoint", "last", "-o", "grid.onnx").code == 0
    content = Path("grid.onnx").read_bytes()
    model = onnx.load_model_from_string(content)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert (properties["env"], properties["algo"]) == ("grid_world.py:GridWorld", "ppo")
    assert json.loads(properties["action_space"]) == {"type": "MultiDiscrete", "nvec": [3, 3], "start": [0, 0]}
    assert json.loads(properties["inputs"])["observation.rover"]["shape"] == ["N", 2]
    assert int(properties["env_steps"]) > 0 and properties["paceline_version"] == paceline.__version__
    assert str(ROOT).encode() not in content and str(here).encode() not in content


def test_the_normaliser_is_inside(cartpole: Path, here: Path) -> None:
    exporting.export(cartpole, "policy.onnx")
    session = onnxruntime.InferenceSession("policy.onnx")
    policy = paceline.load(cartpole).policy
    assert policy.moments is not None and policy.moments.count > 0
    for factor in (1.0, 1e6):  # as they come, and so far off that they are clipped
        rows = np.asarray([[0.1, -0.5, 0.05, 0.3], [-1.0, 2.0, -0.1, -3.0]], np.float32) * np.float32(factor)
        logits, value = session.run(["logits", "value"], {"observation": rows})
        np.testing.assert_allclose(logits, policy.outputs(rows)[0].T, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(value, policy.outputs(rows)[1], rtol=1e-4, atol=1e-6)


def test_a_file_that_acts_differently_is_not_left_behind(
    cartpole: Path, here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    Path("policy.onnx").write_text("an older one")
    finish = exporting._add_metadata

    def spoiled(onnx_: Any, content: bytes, *rest: Any) -> bytes:
        model = onnx.load_model_from_string(finish(onnx_, content, *rest))
        weights = max(model.graph.initializer, key=lambda w: len(w.raw_data))
        weights.raw_data = (np.frombuffer(weights.raw_data, np.float32) * 1.5).tobytes()
        return model.SerializeToString()

    monkeypatch.setattr(exporting, "_add_metadata", spoiled)
    result = cli("export", cartpole, "-o", "policy.onnx")
    assert result.code == 1 and "gives another" in result.err and len(result.err.splitlines()) == 1
    assert [path.name for path in here.iterdir()] == ["policy.onnx"]
    assert Path("policy.onnx").read_text() == "an older one"


def test_a_network_with_a_fixed_batch_is_refused(here: Path, cli: Cli) -> None:
    Path("fixed.py").write_text(
        "import torch\n"
        "class Fixed(torch.nn.Module):\n"
        "    def __init__(self, shape, outputs):\n"
        "        super().__init__()\n"
        "        self.out = torch.nn.Linear(4, outputs + 1)\n"
        "    def forward(self, x):\n"
        "        out = self.out(x.reshape(int(x.shape[0]) * 2, 2)[: len(x) * 2].reshape(len(x), 4))\n"
        "        return out[:, 1:], out[:, 0]\n"
    )
    run = train(here, "fixed", {"env": "CartPole-v1", "model": {"class": "fixed.py:Fixed"}})
    result = cli("export", run)
    assert result.code == 1 and "torch said" in result.err, result.err
    assert not (run / "policy.onnx").exists()


def test_without_the_runtime_it_says_that_it_was_not_checked(
    cartpole: Path, here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = cli("export", cartpole, "-o", "policy.onnx")
    assert result.code == 0 and "checked    no: onnxruntime is not installed" in result.out
    onnx.checker.check_model("policy.onnx")


def test_without_the_environment_the_space_is_sampled(here: Path, cli: Cli) -> None:
    Path("mine.py").write_text((ROOT / "examples/reactor.py").read_text())
    run = train(here, "reactor", {"env": "mine.py:Reactor"})
    Path("mine.py").write_text("raise OSError('the licence server is away')")
    for name in [name for name in sys.modules if name.startswith("paceline_user_")]:
        del sys.modules[name]
    result = cli("export", run)
    assert result.code == 0 and "samples of the observation space (no environment:" in result.out


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("policy.pt", "the name must end in .onnx"),
        ("nowhere/policy.onnx", "there is no folder"),
        ("folder.onnx", "this is a folder"),
    ],
)
def test_a_bad_name_is_refused(output: str, said: str, cartpole: Path, here: Path, cli: Cli) -> None:
    Path("folder.onnx").mkdir()
    result = cli("export", cartpole, "-o", output)
    assert result.code == 2 and said in result.err and len(list(here.iterdir())) == 1


def test_without_onnx_it_says_what_to_install(cartpole: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    result = cli("export", cartpole)
    assert result.code == 2 and 'pip install "paceline[export]"' in result.err
