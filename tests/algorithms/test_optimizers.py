from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.algorithms.optimizers import Adam, RMSprop, clip_norm_

SIZE = 501
RATES = [1e-3, 1e-3, 5e-4, 3e-2, 0.0, 1e-3]


def start() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SIZE, generator=generator), torch.zeros(SIZE)


def gradients(steps: int) -> list[Any]:
    """Of very different sizes, and one that is zero."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-6, 2, SIZE)
    return [torch.randn(SIZE, generator=generator) * sizes * (k != 3) for k in range(steps)]


def test_adam_is_torch_adam() -> None:
    parameters, gradient = start()
    ours = Adam(parameters, gradient)
    reference = torch.nn.Parameter(parameters.clone())
    theirs = torch.optim.Adam([reference], lr=1.0, betas=(0.9, 0.999), eps=1e-5)
    for step, (g, rate) in enumerate(zip(gradients(60), RATES * 10, strict=True)):
        gradient.copy_(g)
        ours.step(rate)
        reference.grad = g.clone()
        theirs.param_groups[0]["lr"] = rate
        theirs.step()
        np.testing.assert_allclose(parameters, reference.detach(), rtol=1e-5, atol=1e-6, err_msg=str(step))
    assert torch.equal(gradient, g)


def test_adam_by_hand() -> None:
    """The first step is lr * g / (|g| + eps), whatever the size of g: the corrections of the moments cancel."""
    parameters, gradient = torch.tensor([1.0, -1.0, 0.5]), torch.tensor([1e-3, -100.0, 0.0])
    Adam(parameters, gradient, eps=1e-5).step(0.1)
    np.testing.assert_allclose(parameters, [1 - 0.1 * 1e-3 / (1e-3 + 1e-5), -0.9, 0.5], rtol=1e-6)


def test_rmsprop_by_hand() -> None:
    """Mnih et al.: s = 0.99 s + 0.01 g^2 from s = 1, then p -= lr g / sqrt(s + eps)."""
    parameters, gradient = start()
    ours = RMSprop(parameters, gradient)
    p, s = parameters.double().numpy().copy(), np.ones(SIZE)
    for g, rate in zip(gradients(30), RATES * 5, strict=True):
        gradient.copy_(g)
        ours.step(rate)
        wide = g.double().numpy()
        s = 0.99 * s + 0.01 * wide**2
        p -= rate * wide / np.sqrt(s + 1e-5)
        np.testing.assert_allclose(parameters, p, rtol=2e-5, atol=2e-6)
    assert torch.equal(gradient, g)


def test_rmsprop_first_step_in_numbers() -> None:
    parameters, gradient = torch.tensor([1.0]), torch.tensor([10.0])
    RMSprop(parameters, gradient, eps=0.0).step(0.1)
    assert float(parameters[0]) == pytest.approx(1 - 0.1 * 10 / math.sqrt(0.99 + 1.0))


@pytest.mark.parametrize("kind", [Adam, RMSprop])
def test_saved_and_loaded_it_goes_on_exactly(kind: Any) -> None:
    parameters, gradient = start()
    one = kind(parameters, gradient)
    steps = gradients(20)
    for g in steps[:10]:
        gradient.copy_(g)
        one.step(1e-2)
    copied, other_gradient = parameters.clone(), torch.zeros(SIZE)
    state = {name: np.array(array) for name, array in one.state().items()}
    other = kind(copied, other_gradient)
    other.load(state)
    for g in steps[10:]:
        gradient.copy_(g)
        other_gradient.copy_(g)
        one.step(1e-2)
        other.step(1e-2)
    assert torch.equal(parameters, copied)


@pytest.mark.parametrize(("longest", "scale"), [(0.5, 0.1), (5.0, 1.0), (100.0, 1.0), (0.0, 1.0)])
def test_a_long_gradient_is_scaled_down(longest: float, scale: float) -> None:
    gradient = torch.tensor([3.0, -4.0, 0.0])
    assert clip_norm_(gradient, longest) == pytest.approx(5.0)
    np.testing.assert_allclose(gradient, np.array([3.0, -4.0, 0.0]) * scale, rtol=1e-5)


def test_clipping_is_that_of_torch() -> None:
    g = gradients(1)[0]
    p = torch.nn.Parameter(torch.zeros(SIZE))
    p.grad = g.clone()
    expected = torch.nn.utils.clip_grad_norm_([p], 0.5)
    assert clip_norm_(g, 0.5) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(g, p.grad, rtol=1e-5)
