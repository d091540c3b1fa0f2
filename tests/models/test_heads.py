"""Against `torch.distributions` in double precision, and against autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from paceline.models.heads import CategoricalHead, GaussianHead, MixedHead, make_head
from paceline.spaces import ActionCodec

NVECS = [(2,), (1,), (5,), (3, 2), (2, 2, 2, 2), (1, 4, 1)]
each_nvec = pytest.mark.parametrize("nvec", NVECS, ids=str)
TOLERANCE: Any = {"rtol": 2e-5, "atol": 2e-6}


def logits(nvec: tuple[int, ...], rows: int, scale: float = 2.0) -> Any:
    return np.random.default_rng(sum(nvec)).normal(scale=scale, size=(sum(nvec), rows)).astype(np.float32)


def indices(nvec: tuple[int, ...], rows: int) -> Any:
    rng = np.random.default_rng(7)
    return np.stack([rng.integers(n, size=rows) for n in nvec], 1)


def categoricals(out: Any, nvec: tuple[int, ...]) -> list[Any]:
    """`out [B, K]` → one distribution for each part."""
    return [Categorical(logits=part) for part in out.split(list(nvec), dim=1)]


def gaussian(dim: int, *, squash: bool = False, spread: float = 0.7) -> GaussianHead:
    log_std = np.linspace(-spread, spread, dim, dtype=np.float32) if dim > 1 else np.array([spread], np.float32)
    return GaussianHead(log_std, np.full(dim, 77, np.float32), squash=squash)


@pytest.mark.parametrize("squash", [False, True])
def test_a_mixture_is_the_sum_of_its_parts(squash: bool) -> None:
    """Log-probability, entropy and gradient; the deviations' gradient is written in place."""
    nvec, numbers, rows = (3, 2), gaussian(2, squash=squash), 37
    head, rng = MixedHead(CategoricalHead(nvec), numbers), np.random.default_rng(3)
    out = rng.normal(size=(7, rows)).astype(np.float32)
    action = head.sample(out, head.noise(rng, (rows,)))
    assert action.shape == (rows, 4) and action.dtype == np.float32
    log_prob, entropy = head.evaluate(out, action)

    x = torch.tensor(out.T, dtype=torch.float64, requires_grad=True)
    log_std = torch.tensor(numbers.log_std, dtype=torch.float64, requires_grad=True)
    chosen, u = torch.from_numpy(action[:, :2]).long(), torch.from_numpy(action[:, 2:]).double()
    choices, normal = categoricals(x[:, :5], nvec), Independent(Normal(x[:, 5:], log_std.exp()), 1)
    expected = sum((d.log_prob(chosen[:, k]) for k, d in enumerate(choices)), normal.log_prob(u))
    expected_entropy = sum((d.entropy() for d in choices), normal.entropy())
    slope = torch.log(1 - torch.tanh(u) ** 2).sum(1) if squash else 0.0
    np.testing.assert_allclose(log_prob, (expected - slope).detach(), rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(entropy, expected_entropy.detach(), **TOLERANCE)

    weight = rng.normal(size=rows).astype(np.float32)
    loss = (expected * torch.from_numpy(weight)).sum() - 0.3 * expected_entropy.sum()
    d_out, d_log_std = torch.autograd.grad(loss, [x, log_std])
    np.testing.assert_allclose(head.gradient(weight, -0.3), d_out.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(numbers.d_log_std, d_log_std, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(head.mode(out)[:, :2], head.choices.mode(out[:5]))


# -- categorical ----------------------------------------------------------------------------------------------------


@each_nvec
def test_categorical_log_prob_entropy_and_gradient(nvec: tuple[int, ...]) -> None:
    head, rows = CategoricalHead(nvec), 37
    out, action = logits(nvec, rows), indices(nvec, rows)
    log_prob, entropy = head.evaluate(out, action)

    x = torch.tensor(out.T, dtype=torch.float64, requires_grad=True)
    parts = categoricals(x, nvec)
    expected = sum(d.log_prob(torch.from_numpy(action[:, k])) for k, d in enumerate(parts))
    expected_entropy = sum(d.entropy() for d in parts)
    assert isinstance(expected, torch.Tensor) and isinstance(expected_entropy, torch.Tensor)
    np.testing.assert_allclose(log_prob, expected.detach(), **TOLERANCE)
    np.testing.assert_allclose(entropy, expected_entropy.detach(), **TOLERANCE)

    weight = np.random.default_rng(1).normal(size=rows).astype(np.float32)
    for d_entropy in (0.0, -0.3):
        loss = (expected * torch.from_numpy(weight)).sum() + d_entropy * expected_entropy.sum()
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        np.testing.assert_allclose(head.gradient(weight, d_entropy), gradient.T, **TOLERANCE)


def test_categorical_keeps_its_digits_at_the_edges() -> None:
    """Large logits, equal ones, and one that outweighs the rest by e^100."""
    head = CategoricalHead((3,))
    out = np.array([[1e4, 5.0, 0.0], [1e4 - 1, 5.0, 100.0], [1e4 - 200, 5.0, 0.0]], np.float32)
    action = np.array([[1], [2], [0]])
    log_prob, entropy = head.evaluate(out, action)
    expected: Any = Categorical(logits=torch.tensor(out.T, dtype=torch.float64))
    np.testing.assert_allclose(log_prob, expected.log_prob(torch.from_numpy(action[:, 0])), **TOLERANCE)
    np.testing.assert_allclose(entropy, expected.entropy(), **TOLERANCE)
    assert np.isfinite(head.gradient(np.ones(3, np.float32), -0.01)).all()


@each_nvec
def test_categorical_samples_as_often_as_their_probabilities_say(nvec: tuple[int, ...]) -> None:
    head, draws = CategoricalHead(nvec), 40_000
    one = logits(nvec, 1, scale=1.0)
    out = np.repeat(one, draws, axis=1)
    noise = head.noise(np.random.default_rng(3), (draws,))
    assert noise.shape == (draws, sum(nvec)) and noise.dtype == np.float32
    action = head.sample(out, noise)
    assert action.shape == (draws, len(nvec)) and action.dtype == np.int64
    joint = np.zeros(nvec)
    np.add.at(joint, tuple(action.T), 1)
    expected = np.ones(())
    for d in categoricals(torch.from_numpy(one.T.astype(np.float64)), nvec):
        expected = np.multiply.outer(expected, d.probs[0].numpy())  # the parts are independent
    # Five standard errors of each frequency: one cell in two million would fail by chance, and the seed is fixed.
    assert (np.abs(joint / draws - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-12).all()


def test_a_class_without_probability_is_never_drawn() -> None:
    head = CategoricalHead((3,))
    noise = head.noise(np.random.default_rng(0), (3,))
    for sure in range(3):
        out = np.full((3, 3), -200.0, np.float32)
        out[sure] = 0.0
        assert head.sample(out, noise)[:, 0].tolist() == [sure] * 3


@each_nvec
def test_categorical_mode(nvec: tuple[int, ...]) -> None:
    out = logits(nvec, 20)
    expected = [d.probs.argmax(1).numpy() for d in categoricals(torch.from_numpy(out.T.copy()), nvec)]
    np.testing.assert_array_equal(CategoricalHead(nvec).mode(out), np.stack(expected, 1))


def test_multibinary_is_bernoulli() -> None:
    codec = ActionCodec(spaces.MultiBinary(3))
    head = make_head(codec, np.zeros(0, np.float32), np.zeros(0, np.float32))
    out, bits = logits((2, 2, 2), 11), np.random.default_rng(0).integers(2, size=(11, 3))
    chance: Any = torch.distributions.Bernoulli(logits=torch.tensor((out[1::2] - out[::2]).T, dtype=torch.float64))
    log_prob, entropy = head.evaluate(out, bits)
    np.testing.assert_allclose(log_prob, chance.log_prob(torch.from_numpy(bits).double()).sum(1), **TOLERANCE)
    np.testing.assert_allclose(entropy, chance.entropy().sum(1), **TOLERANCE)
    np.testing.assert_array_equal(codec.decode(bits), bits)


# -- Gaussian -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("squash", [False, True])
def test_gaussian_log_prob_entropy_and_gradient(dim: int, squash: bool) -> None:
    head, rows = gaussian(dim, squash=squash), 29
    rng = np.random.default_rng(dim)
    out = rng.normal(size=(dim, rows)).astype(np.float32)
    action = rng.normal(scale=1.5, size=(rows, dim)).astype(np.float32)
    log_prob, entropy = head.evaluate(out, action)

    mean = torch.tensor(out.T, dtype=torch.float64, requires_grad=True)
    log_std = torch.tensor(head.log_std, dtype=torch.float64, requires_grad=True)
    normal: Any = Independent(Normal(mean, log_std.exp().expand_as(mean)), 1)
    u = torch.from_numpy(action).double()
    if squash:
        squashed: Any = TransformedDistribution(normal, [TanhTransform()])
        expected = squashed.log_prob(torch.tanh(u))
    else:
        expected = normal.log_prob(u)
    np.testing.assert_allclose(log_prob, expected.detach(), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, normal.entropy().detach(), **TOLERANCE)  # that of the normal, also squashed

    weight = rng.normal(size=rows).astype(np.float32)
    for d_entropy in (0.0, -0.3):
        loss = (expected * torch.from_numpy(weight)).sum() + d_entropy * normal.entropy().sum()
        d_mean, d_log_std = torch.autograd.grad(loss, (mean, log_std), retain_graph=True)
        np.testing.assert_allclose(head.gradient(weight, d_entropy), d_mean.T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(head.d_log_std, d_log_std, rtol=1e-4, atol=1e-4)  # written over, not added


def test_squashing_keeps_its_digits_far_out() -> None:
    """tanh(20) is 1 in float32, but its slope has a logarithm: 2 (log 2 - 20) to within e^-40."""
    head = gaussian(1, squash=True, spread=0.0)
    u = np.array([[20.0], [-20.0]], np.float32)
    log_prob, _ = head.evaluate(u.T.copy(), u)
    expected = -0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - 20)
    np.testing.assert_allclose(log_prob, [expected, expected], rtol=1e-6)


@pytest.mark.parametrize("squash", [False, True])
def test_gaussian_samples_have_the_moments(squash: bool) -> None:
    head, draws = gaussian(2, squash=squash), 40_000
    out = np.repeat(np.array([[0.5], [-2.0]], np.float32), draws, axis=1)
    noise = head.noise(np.random.default_rng(5), (draws,))
    action = head.sample(out, noise)
    assert action.dtype == np.float32 and action.shape == (draws, 2)
    std = np.exp(head.log_std)
    # Five standard errors: s/sqrt(n) of a mean, s/sqrt(2n) of a deviation; the seed is fixed.
    assert (np.abs(action.mean(0) - [0.5, -2.0]) < 5 * std / np.sqrt(draws)).all()
    assert (np.abs(action.std(0) - std) < 5 * std / np.sqrt(2 * draws)).all()
    assert abs(np.corrcoef(action.T)[0, 1]) < 5 / np.sqrt(draws)


def test_squashed_log_prob_is_the_density_of_the_action_taken() -> None:
    """The probabilities of bins of tanh(u), counted, against the density that `log_prob` gives."""
    head, draws = gaussian(1, squash=True, spread=-0.2), 200_000
    out = np.full((1, draws), 0.3, np.float32)
    action = head.sample(out, head.noise(np.random.default_rng(8), (draws,)))
    log_prob, _ = head.evaluate(out, action)
    taken = np.tanh(action[:, 0])
    for low in (-0.6, 0.0, 0.4, 0.8):
        inside = (taken >= low) & (taken < low + 0.05)
        density = np.exp(log_prob[inside]).mean()
        assert density * 0.05 == pytest.approx(inside.mean(), rel=0.05)


def test_gaussian_mode_is_a_copy_of_the_mean() -> None:
    head, out = gaussian(2), np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    mode = head.mode(out)
    assert mode.tolist() == [[1, 3], [2, 4]]
    out[:] = 0
    assert mode[0, 0] == 1


@pytest.mark.parametrize(
    ("space", "kind", "outputs"),
    [
        (spaces.Discrete(4, start=2), CategoricalHead, 4),
        (spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])), CategoricalHead, 14),
        (spaces.MultiBinary(3), CategoricalHead, 6),
        (spaces.Box(-1.0, 1.0, (2, 2)), GaussianHead, 4),
    ],
    ids=str,
)
def test_which_head(space: Any, kind: type[Any], outputs: int) -> None:
    codec = ActionCodec(space)
    head = make_head(codec, np.zeros(codec.dim, np.float32), np.zeros(codec.dim, np.float32))
    assert isinstance(head, kind) and head.num_outputs == outputs == codec.num_outputs
    assert head.noise(np.random.default_rng(0), (3, 2)).shape == (3, 2, outputs)
