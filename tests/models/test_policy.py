from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from paceline.collective.group import Group
from paceline.config import ModelConfig, UserError
from paceline.models.normalizer import CLIP
from paceline.models.policy import Policy
from paceline.spaces import ActionCodec, ObservationCodec

VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (12, 12, 3), np.uint8)
MIXED = spaces.Dict({"camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "state": VECTOR})
ACTIONS: dict[str, Any] = {
    "discrete": spaces.Discrete(3),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(-2.0, 2.0, (2,)),
}
OBSERVATIONS = {"vector": VECTOR, "image": IMAGE, "mixed": MIXED}
OWN_NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, outputs, width=8):
        super().__init__()
        self.torso = nn.Sequential(nn.Flatten(), nn.Linear(int(torch.tensor(shape).prod()), width), nn.SiLU())
        self.policy, self.critic = nn.Linear(width, outputs), nn.Linear(width, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        h = self.torso(x.float())
        return self.policy(h), self.critic(h)[:, 0]

class Wide(Net):
    def forward(self, x):
        policy, value = super().forward(x)
        return policy, value[:, None]

class Double(Net):
    def __init__(self, *args):
        super().__init__(*args)
        self.double()

    def forward(self, x):
        h = self.torso(x.double())
        return self.policy(h), self.critic(h)[:, 0]

class Broken(Net):
    def forward(self, x):
        raise ValueError("not today")

def no_module(shape, outputs):
    return lambda x: (torch.zeros(len(x), outputs), torch.zeros(len(x)))
"""


def make(observation: Any = VECTOR, action: Any = ACTIONS["discrete"], *, normalize: bool = False, seed: int = 0,
         squash: bool = False, **model: Any) -> Policy:  # fmt: skip
    codecs = ObservationCodec(observation), ActionCodec(action, squash=squash)
    return Policy(*codecs, ModelConfig(**model), seed=seed, normalize_observation=normalize)


def observations(policy: Policy, rows: int, seed: int = 0) -> Any:
    space = policy.observation.space
    space.seed(seed)
    out = np.zeros((rows, *policy.observation.shape), policy.observation.dtype)
    for row in out:
        policy.observation.encode_one(space.sample(), row)
    return out


@pytest.fixture
def own_net(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(OWN_NET)
    return path


# -- acting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", OBSERVATIONS)
@pytest.mark.parametrize("action", ACTIONS)
def test_acting_agrees_with_the_network(kind: str, action: str, shared: bool) -> None:
    policy = make(OBSERVATIONS[kind], ACTIONS[action], shared=shared)
    policy.parameters.add_(torch.randn(policy.parameters.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    x = observations(policy, 6)
    noise = policy.head.noise(np.random.default_rng(0), (6,))
    acts = policy.act(x, noise)[0].copy()
    assert acts.shape == (6, *policy.action.shape) and acts.dtype == policy.action.dtype
    with torch.no_grad():
        out, expected_value = policy.net(torch.from_numpy(x))
    out = out.numpy().T.copy()
    np.testing.assert_allclose(acts, policy.head.sample(out, noise), rtol=1e-4, atol=1e-4)
    expected_log_prob = policy.head.evaluate(out, acts)[0].copy()
    for log_prob, value in (policy.act(x, noise)[1:], policy.evaluate_actions(x, acts), (None, policy.value(x))):
        if log_prob is not None:
            np.testing.assert_allclose(log_prob, expected_log_prob, rtol=1e-4, atol=1e-4)
        if value is not None:
            np.testing.assert_allclose(value, expected_value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(policy.greedy(x), policy.head.mode(out), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(policy.act(x, noise)[0], acts)


def test_one_flat_buffer_holds_it_all() -> None:
    for observation in OBSERVATIONS.values():
        policy = make(observation, ACTIONS["box"])
        x = observations(policy, 3)
        inside = [*policy.net.parameters()]
        assert policy.parameters.numel() == sum(p.numel() for p in inside) + 2
        start = policy.parameters.data_ptr()
        for p in inside:
            assert p.grad is not None
            assert start <= p.data_ptr() < start + 4 * policy.parameters.numel()
            assert p.data_ptr() - start == p.grad.data_ptr() - policy.gradient.data_ptr()
        policy.parameters.fill_(0.0)
        assert not policy.greedy(x).any() and not policy.value(x).any()
        assert policy.head.log_std.tolist() == [0.0, 0.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_learning_twice_gives_the_same_gradient(kind: str) -> None:
    policy = make(OBSERVATIONS[kind], ACTIONS["box"])
    x, rng = observations(policy, 6), np.random.default_rng(0)
    acts = rng.normal(size=(6, 2)).astype(np.float32)
    weight, d_value = (rng.normal(size=6).astype(np.float32) for _ in range(2))

    def policy_loss(out: Any) -> Any:
        policy.head.evaluate(out, acts)
        return policy.head.gradient(weight, -0.1)

    gradients = []
    for _ in range(2):
        policy.learn(x, policy_loss, lambda _: d_value)
        gradients.append(policy.gradient.clone())
    policy.gradient.fill_(77.0)
    policy.learn_jointly(x, lambda out, values: (policy_loss(out), d_value * np.float32(values.shape == (6,))))
    assert torch.equal(gradients[0], policy.gradient)
    assert torch.equal(*gradients) and gradients[0].abs().min() >= 0 and gradients[0][-2:].all()


@pytest.mark.parametrize("cnn", ["small", "impala"])
def test_the_weights_of_convolutions_and_their_gradients_stay_channels_last_in_the_flat_buffer(cnn: str) -> None:
    policy = make(IMAGE, cnn=cnn, hidden=[8])
    convolutions = [p for p in policy.net.parameters() if p.dim() == 4]
    before = [p.grad.data_ptr() for p in convolutions if p.grad is not None]
    policy.learn(observations(policy, 4), lambda out: np.ones_like(out), lambda value: np.ones_like(value))
    after = [p.grad for p in convolutions if p.grad is not None]
    assert [g.data_ptr() for g in after] == before and len(before) == len(convolutions) > 0
    for tensor in [*convolutions, *after]:
        assert tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    flat = torch.cat([g.permute(0, 2, 3, 1).ravel() if g.dim() == 4 else g.ravel()
                      for g in (p.grad for p in policy.net.parameters()) if g is not None])  # fmt: skip
    assert torch.equal(flat, policy.gradient)


@pytest.mark.parametrize("action", ["discrete", "box"])
@pytest.mark.parametrize("kind", ["image", "mixed"])
def test_several_passes_add_up_to_one(kind: str, action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(OBSERVATIONS[kind], ACTIONS[action], hidden=[8])
    x, rng = observations(policy, 10), np.random.default_rng(0)
    noise = policy.head.noise(rng, (10,))
    acts, weight = policy.act(x, noise)[0], rng.normal(size=10).astype(np.float32)

    def learn(part: slice, *, add: bool) -> None:
        def policy_loss(out: Any) -> Any:
            policy.head.evaluate(out, acts[part])
            return policy.head.gradient(weight[part], -0.1)

        policy.learn(x[part], policy_loss, lambda value: value * weight[part], add=add)

    assert policy.passes(10) == [slice(0, 10)]
    learn(slice(0, 10), add=False)
    whole = policy.gradient.clone()
    monkeypatch.setattr("paceline.models.policy.PASS_BYTES", 4 * policy.net.row_bytes)  # type: ignore[operator]
    parts = policy.passes(10)
    assert parts == [slice(0, 3), slice(3, 6), slice(6, 10)]
    policy.gradient.fill_(77.0)
    for part in parts:
        learn(part, add=part.start > 0)
    assert float(whole.abs().max()) > 0
    torch.testing.assert_close(policy.gradient, whole, rtol=1e-4, atol=1e-5)


def test_passes_keep_to_their_memory() -> None:
    """2,048 rows of the IMPALA-CNN would take more than 4 GB at once; an MLP is never cut."""
    procgen = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    large = make(procgen, spaces.Discrete(15), cnn="impala", hidden=[256], shared=True)
    assert [p.stop - p.start for p in large.passes(2048)] == [256] * 8
    assert len(make(procgen, spaces.Discrete(15), cnn="nature", hidden=[512]).passes(2048)) == 1
    assert make().passes(10**6) == [slice(0, 10**6)] and large.passes(0) == []


def test_the_seed_decides_the_weights(own_net: Path) -> None:
    cases: tuple[dict[str, Any], ...] = ({}, {"class": f"{own_net}:Net"})
    for options in cases:
        one, same, other = (make(seed=seed, **options).parameters for seed in (1, 1, 2))
        assert torch.equal(one, same) and not torch.equal(one, other)


def test_making_a_policy_leaves_the_global_generator_of_a_users_network_alone(own_net: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    options: dict[str, Any] = {"class": f"{own_net}:Net"}
    make(**options)
    assert torch.equal(torch.rand(3), expected)


# -- normalising ----------------------------------------------------------------------------------------------------


def feed(policy: Policy, rows: Any) -> None:
    assert policy.moments is not None
    policy.moments.update(rows, Group())
    policy.normalizer_changed()


def test_observations_are_shifted_scaled_and_clipped() -> None:
    policy = make(normalize=True)
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(1000, 4)) * [1, 10, 0.1, 0] + [0, 50, -3, 7]).astype(np.float32)
    np.testing.assert_array_equal(policy.prepare(rows[:3]), np.clip(rows[:3], -CLIP, CLIP))  # nothing seen yet
    feed(policy, rows)
    x = policy.prepare(rows)
    assert x.dtype == np.float32
    np.testing.assert_allclose(x.mean(0), [0, 0, 0, 0], atol=1e-4)
    np.testing.assert_allclose(x.std(0), [1, 1, 1, 0], rtol=1e-3)
    far = rows[:2] + np.float32(1e6)
    np.testing.assert_array_equal(policy.prepare(far), np.full((2, 4), CLIP, np.float32))
    np.testing.assert_array_equal(rows[:2] + np.float32(1e6), far)  # not in place
    np.testing.assert_allclose(policy.value(rows), policy.net(torch.from_numpy(x))[1].detach(), rtol=1e-4, atol=1e-5)


def test_pixels_among_a_vector_are_left_alone() -> None:
    policy = make(MIXED, normalize=True)
    x = observations(policy, 50)
    x[:, -4:] = x[:, -4:] * 3 + 100
    feed(policy, x)
    prepared = policy.prepare(x)
    np.testing.assert_array_equal(prepared[:, :-4], x[:, :-4])
    np.testing.assert_allclose(prepared[:, -4:].mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(prepared[:, -4:].std(0), 1, rtol=1e-3)
    x[:, -4:] += 1e6
    np.testing.assert_array_equal(policy.prepare(x)[:, -4:], np.full((50, 4), CLIP))  # clipped like any other


def test_pictures_alone_are_left_alone() -> None:
    policy = make(spaces.Tuple([MIXED["camera"], MIXED["camera"]]), normalize=True)
    x = observations(policy, 20)
    feed(policy, x)
    np.testing.assert_array_equal(policy.prepare(x), x)


# -- saving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["vector", "image", "mixed", "own"])
def test_saved_and_loaded(kind: str, normalize: bool, own_net: Path) -> None:
    observation = OBSERVATIONS.get(kind, VECTOR)
    normalize = normalize and kind != "image"
    options: dict[str, Any] = {"class": f"{own_net}:Net"} if kind == "own" else {}
    one, other = (make(observation, ACTIONS["box"], normalize=normalize, seed=s, **options) for s in (1, 2))
    one.parameters.mul_(1.5).add_(0.01)
    if kind == "own":
        one.net.seen.fill_(3.0)  # type: ignore[operator]
    if normalize:
        feed(one, observations(one, 40))
    x = observations(one, 5, seed=9)
    expected = one.greedy(x).copy(), one.value(x).copy()
    other.prepare(x)  # what it has worked out for its own moments must not outlive them
    other.load({name: np.array(array) for name, array in one.state().items()})
    np.testing.assert_array_equal(other.greedy(x), expected[0])
    np.testing.assert_array_equal(other.value(x), expected[1])
    assert torch.equal(one.parameters, other.parameters)  # log_std too
    if kind == "own":
        assert other.net.seen.tolist() == [3.0] * 3  # type: ignore[operator]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"observation": spaces.Box(-1.0, 1.0, (5,))}, "there"),
        ({"action": spaces.Discrete(4)}, "there"),
        ({"hidden": [32, 32, 32]}, "there"),
        ({"hidden": [64]}, "there"),
        ({"shared": True}, "here"),
        ({"normalize": True}, "normalizer"),
        ({"action": ACTIONS["box"]}, "here"),
    ],
    ids=str,
)
def test_weights_of_another_network_are_refused(change: dict[str, Any], named: str) -> None:
    policy = make()
    before = policy.parameters.clone()
    with pytest.raises(UserError, match=named):
        policy.load(make(**change).state())
    assert torch.equal(policy.parameters, before)


# -- a user's own network -------------------------------------------------------------------------------------------


def test_a_users_network(own_net: Path) -> None:
    options: dict[str, Any] = {"class": f"{own_net}:Net", "kwargs": {"width": 5}}
    policy = make(IMAGE, **options)
    assert policy.fast is None and policy.net.torso[1].out_features == 5  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("name", "kwargs", "named"),
    [
        ("Wide", {}, r"but returned \[2, 3\] and \[2, 1\]"),
        ("Broken", {}, "ValueError: not today"),
        ("Double", {}, "float32"),
        ("no_module", {}, "expected a torch.nn.Module"),
        ("Nothing", {}, "it has no 'Nothing'"),
        ("Net", {"depth": 3}, "TypeError.*depth"),
    ],
)
def test_what_is_wrong_with_a_users_network(own_net: Path, name: str, kwargs: dict[str, Any], named: str) -> None:
    options: dict[str, Any] = {"class": f"{own_net}:{name}", "kwargs": kwargs}
    with pytest.raises(UserError, match=named):
        make(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cnn": "small"}, "model.cnn"),
        ({"cnn": "impala", "cnn_pool": True}, "model.cnn=impala is for images"),
        ({"log_std_init": -1.0}, "log_std_init"),
        ({"observation": IMAGE, "normalize": True}, "normalize_observation"),
    ],
    ids=str,
)
def test_a_setting_that_would_do_nothing_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        make(**options)
