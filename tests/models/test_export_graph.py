"""The policy as one torch module: it has to do what the codecs, the normaliser and the network do one by one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from paceline.algorithms.ppo import PPO
from paceline.config import RunConfig
from paceline.config.resolve import validate
from paceline.models.export_graph import Graph, stack_leaves
from paceline.spaces import ActionCodec, ObservationCodec
from space_envs import ACTIONS as NESTED

ROWS = 12
BOX = spaces.Box(-3.0, 3.0, (4,), np.float32)
BOUNDS = np.array([[[-1.0], [0.5]], [[2.0], [0.75]]], np.float32)
TWO = spaces.Discrete(2)
MIXED = spaces.Dict(
    OrderedDict(
        where=spaces.MultiDiscrete([[3, 4], [2, 5]], start=[[1, 0], [0, -2]]),
        alone=spaces.Box(-1, 1, (), np.float64),
        picture=spaces.Box(0, 255, (10, 12, 3), np.uint8),
        pair=spaces.Tuple([spaces.Discrete(3, start=5), spaces.MultiBinary((2, 2))]),
        far=spaces.Box(0, 60_000, (2,), np.uint16),
    )
)


def image(*shape: int, dtype: Any = np.uint8) -> spaces.Box:
    return spaces.Box(0, 255 if dtype == np.uint8 else 1, shape, dtype)


CASES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any], dict[str, Any]]] = {
    "one choice": (BOX, spaces.Discrete(3, start=4), {}),
    "choices": (BOX, spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[0, 1], [-2, 0]]), {}),
    "switches": (BOX, spaces.MultiBinary((2, 3)), {}),
    "bounds": (BOX, spaces.Box(*BOUNDS, (2, 1), np.float32), {}),
    "no bounds": (BOX, spaces.Box(-np.inf, np.inf, (2,), np.float64), {}),
    "whole numbers": (BOX, spaces.Box(0, 9, (3,), np.int32), {}),
    "squashed": (BOX, spaces.Box(-1, 3, (2,), np.float32), {"model": {"squash": True}}),
    "everything, normalised": (MIXED, TWO, {"env": {"normalize_observation": True}}),
    "rows": (image(40, 44, 3), TWO, {"model": {"cnn": "nature"}}),
    "planes": (image(3, 16, 18), TWO, {"model": {"cnn": "impala", "cnn_pool": True, "cnn_width": 0.5}}),
    "gray": (image(12, 14), TWO, {}),
    "stacked rows": (image(4, 12, 14, 3), TWO, {}),
    "stacked planes": (image(4, 3, 12, 14), TWO, {}),
    "floats": (image(3, 12, 14, dtype=np.float32), TWO, {}),
    "shared": (BOX, TWO, {"model": {"shared": True}, "env": {"normalize_observation": True}}),
    "values": (BOX, spaces.Discrete(4), {"algo": "dqn"}),
    "dueling": (BOX, spaces.Discrete(4), {"algo": "dqn", "dqn": {"dueling": True}}),
    "dueling, shared": (BOX, TWO, {"algo": "dqn", "dqn": {"dueling": True}, "model": {"shared": True}}),
    "masked choices": (MIXED, spaces.MultiDiscrete([3, 4]), {"env": {"normalize_observation": True}, "masked": True}),
    "nested choices": (MIXED, NESTED["choices"], {}),
    "nested numbers": (BOX, NESTED["numbers"], {}),
    "nested, squashed": (BOX, NESTED["bounded"], {"model": {"squash": True}}),
    "nested value": (BOX, NESTED["one choice"], {"algo": "dqn"}),
    "nested, masked": (BOX, NESTED["choices"], {"masked": True}),
    "masked values": (image(12, 14), spaces.Discrete(4), {"algo": "dqn", "dqn": {"dueling": True}, "masked": True}),
    "noisy": (image(12, 14), spaces.Discrete(4), {"algo": "dqn", "dqn": {"exploration": "noisy"}}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_its_parts_do(name: str) -> None:
    observation, action, tree = CASES[name]
    config: RunConfig = validate({key: value for key, value in tree.items() if key != "masked"})
    actions = ActionCodec(action, squash=config.model.squash)
    codec = ObservationCodec(observation, mask=actions.nvec if "masked" in tree else ())
    policy = config.algorithm.make_policy(config, codec, actions, seed=3)
    rng = np.random.default_rng(5)
    policy.parameters += torch.from_numpy(rng.standard_normal(len(policy.parameters), np.float32)) * 0.2
    observation.seed(1)
    seen = [observation.sample() for _ in range(ROWS)]
    rows = np.zeros((ROWS, *codec.shape), codec.dtype)
    for row, one in zip(rows, seen, strict=True):
        codec.encode_one(one, row)
    if codec.mask:
        rows[:, codec.mask_columns] = rng.random((ROWS, sum(codec.mask))) < 0.5
        rows[:, codec.net_size + np.cumsum((0, *codec.mask[:-1]))] = 1
    if policy.moments is not None:
        policy.moments.merge(policy.moments.sums(rows[:4] / 3))  # narrower than what comes: some is clipped
        policy.normalizer_changed()
        assert (np.abs(policy.prepare(rows)) == 10).any()

    graph = Graph(policy)
    inputs = stack_leaves(graph, seen, rows)
    with torch.no_grad():
        results = graph(*(torch.from_numpy(array) for array in inputs.values()))
    got = {port.name: result.numpy() for port, result in zip(graph.outputs, results, strict=True)}

    for port in (*graph.inputs, *graph.outputs):
        array = inputs.get(port.name, got.get(port.name))
        assert array is not None and (array.shape, array.dtype) == ((ROWS, *port.shape), port.dtype)
    out, value = policy.outputs(rows)
    np.testing.assert_allclose(got[graph.outputs[len(graph.actions)].name], out.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["value"], value, rtol=1e-4, atol=1e-5)
    assert (out.std(axis=1) > 1e-3).all()  # else any constant would pass
    wanted = policy.action.decode_parts(policy.greedy(rows))
    for port, part, array in zip(graph.actions, policy.action.parts, wanted, strict=True):
        np.testing.assert_allclose(got[port.name], array, rtol=1e-5, atol=1e-5)
        assert all(part.space.contains(one.astype(part.space.dtype)) for one in got[port.name])
    if "log_std" in got:
        assert (got["log_std"] == policy.state()["log_std"]).all()


def test_names_follow_the_tree() -> None:
    policy = PPO.make_policy(validate({}), ObservationCodec(MIXED), ActionCodec(TWO))
    names = [port.name for port in Graph(policy).inputs]
    assert names == [f"observation.{part}" for part in ("where", "alone", "picture", "pair.0", "pair.1", "far")]
    policy = PPO.make_policy(validate({}), ObservationCodec(BOX), ActionCodec(NESTED["choices"]))
    names = [port.name for port in Graph(policy).outputs]
    assert names == ["action.grip", "action.move.0", "action.move.1", "logits", "value"]
