from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.nn import functional

from paceline.config import ModelConfig, UserError
from paceline.config.resolve import validate
from paceline.models.nets import CnnActorCritic, MlpActorCritic
from paceline.spaces import ObservationCodec

NUMPY_ACTIVATIONS: dict[str, Any] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(x)),
}


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(hidden: list[int], *, shared: bool = False, activation: str = "tanh", seed: int = 1) -> MlpActorCritic:
    return MlpActorCritic(5, hidden, activation, shared, 3, generator(seed))


def cnn(space: Any, outputs: int = 3, **options: Any) -> CnnActorCritic:
    return CnnActorCritic(ObservationCodec(space), ModelConfig(**options), outputs, generator())


def image(height: int, width: int, channels: int = 3) -> spaces.Box:
    return spaces.Box(0, 255, (height, width, channels), np.uint8)


def linears(net: nn.Module) -> list[nn.Linear]:
    return [layer for layer in net.modules() if isinstance(layer, nn.Linear)]


# -- MLP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("hidden", [[], [8], [8, 6]], ids=str)
def test_an_mlp_is_its_formula(hidden: list[int], shared: bool, activation: str) -> None:
    net = mlp(hidden, shared=shared, activation=activation).double()
    x = np.random.default_rng(0).normal(size=(7, 5))
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape, generator=generator()))
        policy, value = net(torch.from_numpy(x))
    layers = linears(net)
    depth = len(hidden) + 1
    assert len(layers) == (depth if shared else 2 * depth)

    def run(tower: list[nn.Linear]) -> Any:
        h = x
        for k, layer in enumerate(tower):
            h = h @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
            if k < len(tower) - 1:
                h = NUMPY_ACTIVATIONS[activation](h)
        return h

    if shared:
        out = run(layers)
        expected, expected_value = out[:, :3], out[:, 3]
    else:
        expected, expected_value = run(layers[:depth]), run(layers[depth:])[:, 0]
    np.testing.assert_allclose(policy, expected, rtol=1e-9)
    np.testing.assert_allclose(value, expected_value, rtol=1e-9)
    assert policy.shape == (7, 3) and value.shape == (7,)


def test_two_towers_have_nothing_in_common_and_a_shared_torso_has() -> None:
    x = torch.randn(4, 5, generator=generator())
    for shared in (False, True):
        net = mlp([8, 8], shared=shared)
        policy, value = net(x)
        of_policy = torch.autograd.grad(policy.sum(), list(net.parameters()), allow_unused=True, retain_graph=True)
        of_value = torch.autograd.grad(value.sum(), list(net.parameters()), allow_unused=True)
        both = [p is not None and v is not None for p, v in zip(of_policy, of_value, strict=True)]
        assert all(both) if shared else not any(both)


@pytest.mark.parametrize("shared", [False, True])
def test_the_first_policy_is_nearly_uniform_and_the_value_is_not_flat(shared: bool) -> None:
    x = torch.randn(500, 5, generator=generator())
    with torch.no_grad():
        policy, value = mlp([64, 64], shared=shared)(x)
    assert float(policy.abs().max()) < 0.1
    assert 0.05 < float(value.std()) < 3.0


def test_layers_begin_orthogonal_and_without_bias() -> None:
    for layer in linears(mlp([16, 16])):
        assert not layer.bias.any()
        w = layer.weight.detach().double()
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        gain = float(gram[0, 0])
        assert gain == pytest.approx(2.0, rel=1e-4) or gain == pytest.approx(1.0, rel=1e-4) or gain < 1e-3
        np.testing.assert_allclose(gram, gain * np.eye(len(gram)), atol=1e-5)


def test_the_generator_alone_decides_the_weights() -> None:
    def flat(net: nn.Module) -> Any:
        return torch.cat([p.detach().ravel() for p in net.parameters()]).numpy()

    torch.manual_seed(1)
    first = [flat(mlp([8])), flat(cnn(image(12, 12)))]
    torch.manual_seed(2)
    second = [flat(mlp([8])), flat(cnn(image(12, 12)))]
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(flat(mlp([8], seed=2)), first[0])


# -- CNN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "name", "features"),
    [
        (image(84, 84), "auto", 64 * 7 * 7),  # (84-8)/4+1 = 20, (20-4)/2+1 = 9, 9-3+1 = 7
        (image(84, 84), "small", 32 * 20 * 20),  # (84-3)/2+1 = 41, (41-3)/2+1 = 20
        (image(36, 36), "auto", 64 * 1 * 1),
        (image(35, 84), "auto", 32 * 8 * 20),
        (image(8, 8), "auto", 32 * 1 * 1),
        (image(64, 96, 1), "nature", 64 * 4 * 8),
        (image(64, 64), "impala", 32 * 8 * 8),
        (image(9, 84, 1), "impala", 32 * 2 * 11),  # 9 → 5 → 3 → 2, 84 → 42 → 21 → 11
    ],
)
def test_convolutions_of_many_sizes(space: Any, name: str, features: int) -> None:
    net = cnn(space, cnn=name, hidden=[16])
    assert linears(net)[0].in_features == features
    x = torch.zeros(2, *ObservationCodec(space).shape, dtype=torch.uint8)
    policy, value = net(x)
    assert policy.shape == (2, 3) and value.shape == (2,)


def test_nature_needs_its_pixels() -> None:
    with pytest.raises(UserError, match="at least 36 pixels"):
        cnn(image(35, 64), cnn="nature")


@pytest.mark.parametrize("shared", [False, True])
def test_a_cnn_is_its_parts(shared: bool) -> None:
    space = image(12, 10)
    net = cnn(space, hidden=[16], shared=shared)
    x = torch.randint(0, 256, (5, 3, 12, 10), dtype=torch.uint8, generator=generator())
    policy, value = net(x)
    features = net.convolutions[0](x.float() / 255)
    expected, expected_value = net.head(features)
    torch.testing.assert_close(policy, expected)
    torch.testing.assert_close(value, expected_value)
    assert features.shape == (5, 32 * 2 * 1) and float(features.detach().abs().max()) < 10


def test_pictures_among_a_vector_are_cut_out_again() -> None:
    space = spaces.Dict(
        {
            "camera": image(9, 8),
            "depth": spaces.Box(0.0, 1.0, (8, 8, 1), np.float32),
            "mode": spaces.Discrete(3),
            "state": spaces.Box(-1.0, 1.0, (2,), np.float32),
        }
    )
    codec = ObservationCodec(space)
    space.seed(0)
    samples = [space.sample() for _ in range(4)]
    x = np.zeros((4, codec.size), np.float32)
    for row, sample in zip(x, samples, strict=True):
        codec.encode_one(sample, row)
    net = cnn(space, hidden=[16])
    policy, value = net(torch.from_numpy(x))
    camera = torch.from_numpy(np.stack([s["camera"].transpose(2, 0, 1) for s in samples])).float() / 255
    depth = torch.from_numpy(np.stack([s["depth"].transpose(2, 0, 1) for s in samples]))
    rest = torch.from_numpy(x[:, -5:])
    expected, expected_value = net.head(
        torch.cat([net.convolutions[0](camera), net.convolutions[1](depth), rest], dim=1)
    )
    torch.testing.assert_close(policy, expected)
    torch.testing.assert_close(value, expected_value)


PAPER: dict[str, Any] = {"cnn": "impala", "hidden": [256], "activation": "relu", "shared": True}


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        # Convolutions 448 + 4 x 2,320, 4,640 + 4 x 9,248, 9,248 + 4 x 9,248; 2,048 x 256 + 256; 256 x 16 + 16.
        (PAPER, 97_600 + 524_544 + 4_112),
        # 32, 64, 64 channels: 896 + 4 x 9,248, 18,496 + 4 x 36,928, 36,928 + 4 x 36,928; 4,096 x 256 + 256.
        (PAPER | {"cnn_width": 2}, 388_736 + 1_048_832 + 4_112),
        # 4, 8, 8 channels: 112 + 4 x 148, 296 + 4 x 584, 584 + 4 x 584; 512 x 256 + 256.
        (PAPER | {"cnn_width": 0.25}, 6_256 + 131_328 + 4_112),
        # One number a channel instead of 8 x 8: 32 x 256 + 256.
        (PAPER | {"cnn_pool": True}, 97_600 + 8_448 + 4_112),
        # rl-cluster-benchmark: 6,176 + 32,832 + 36,928; twice 1,024 x 512 + 512; 512 x 15 + 15 and 512 + 1.
        ({"cnn": "nature", "hidden": [512], "activation": "relu"}, 75_936 + 2 * 524_800 + 7_695 + 513),
    ],
    ids=str,
)
def test_known_networks_have_their_number_of_parameters(options: dict[str, Any], parameters: int) -> None:
    """For 64 x 64 x 3 pixels and 15 actions, as in Procgen; by hand."""
    assert sum(p.numel() for p in cnn(image(64, 64), 15, **options).parameters()) == parameters


def plain_impala(net: CnnActorCritic, x: torch.Tensor, *, pool: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Written out: nothing in place, not channels_last."""
    convs = iter([m for m in net.modules() if isinstance(m, nn.Conv2d)])

    def conv(h: torch.Tensor) -> torch.Tensor:
        layer = next(convs)
        return functional.conv2d(h, layer.weight.contiguous(), layer.bias, padding=1)

    h = x.float() / 255
    for _ in range(3):
        h = functional.max_pool2d(conv(h), 3, 2, 1)
        for _ in range(2):
            h = h + conv(torch.relu(conv(torch.relu(h))))
    h = torch.relu(h)
    h = h.mean(3).mean(2) if pool else h.flatten(1)
    first, last = linears(net)
    out = last(torch.relu(first(h)))
    return out[:, :-1], out[:, -1]


@pytest.mark.parametrize("pool", [False, True])
def test_the_impala_cnn_is_its_formula(pool: bool) -> None:
    net = cnn(image(17, 12), cnn="impala", cnn_width=0.5, cnn_pool=pool, hidden=[16], activation="relu", shared=True)
    x = torch.randint(0, 256, (5, 3, 17, 12), dtype=torch.uint8, generator=generator())
    results = []
    for policy, value in (net(x), plain_impala(net, x, pool=pool)):
        weight = torch.linspace(-1, 1, policy.numel()).reshape(policy.shape)
        gradient = torch.autograd.grad((policy * weight).sum() + (value * value).sum(), list(net.parameters()))
        results.append([policy, value, *gradient])
    assert all(bool(g.any()) for g in results[0])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-5)


def test_the_impala_cnn_begins_as_the_code_of_the_paper() -> None:
    net = cnn(image(64, 64), 15, **PAPER)
    first, last = linears(net)
    for layer in [*(m for m in net.modules() if isinstance(m, nn.Conv2d)), first]:
        assert layer.bias is not None and not layer.bias.any()
        w = layer.weight.detach()
        area = w[0, 0].numel()
        bound = (6 / (area * (w.shape[0] + w.shape[1]))) ** 0.5  # uniform up to here
        assert 0.95 * bound < float(w.abs().max()) <= bound
        assert float(w.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
    assert float(last.weight[:15].detach().norm(dim=1).max()) == pytest.approx(0.01, rel=1e-3)
    assert float(last.weight[15].detach().norm()) == pytest.approx(1.0, rel=1e-3)


def test_looking_does_not_change_what_is_seen() -> None:
    """Pixels that are floats already are not divided in place."""
    space = spaces.Dict({"camera": image(9, 8), "state": spaces.Box(-1.0, 1.0, (2,), np.float32)})
    x = torch.rand(3, ObservationCodec(space).size) * 255
    before = x.clone()
    cnn(space, hidden=[4])(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"cnn_width": 2}, "model.cnn_width=2.0 needs model.cnn=impala, not auto"),
        ({"cnn": "nature", "cnn_pool": True}, "model.cnn_pool=true needs model.cnn=impala, not nature"),
        ({"class": "net.py:Net", "cnn_width": 2}, "model.cnn_width has no effect"),
        ({"cnn": "impala", "cnn_width": 0.1}, "model.cnn_width=0.1: input should be greater than or equal to 0.25"),
        ({"cnn": "inpala"}, "model.cnn=inpala is not one of auto, nature, impala, small.*; did you mean 'impala'"),
    ],
    ids=str,
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        validate({"model": options})
    assert re.match(line, str(error.value))
