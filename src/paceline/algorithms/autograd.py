"""The gradient of an algorithm's loss by autograd: for networks and losses without an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.algorithms.rows import Rows
from paceline.lazy import torch

if TYPE_CHECKING:
    from paceline.algorithms.base import Algorithm


def gradient_over_rows(algorithm: Algorithm, rows: Rows, weight: float) -> dict[str, float]:
    """The gradient of a loss over independent rows into the policy's flat gradient; returns the statistics."""
    policy = algorithm.policy
    policy.gradient.zero_()
    totals = dict.fromkeys(algorithm.statistics, 0.0)
    for part in policy.passes(len(rows)):
        some = rows.take(part).tensors(weight, policy.device)
        out = policy.forward(some.obs)
        loss, statistics = algorithm.loss(some, out)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, value in as_floats(algorithm, loss, statistics).items():
            totals[name] += value
    return totals


def gradient_over_batch(algorithm: Algorithm, rows: Any, x: Any) -> dict[str, float]:
    """The same for a loss in which the gradient of one row depends on the outputs of all."""
    policy, parts = algorithm.policy, algorithm.policy.passes(len(x))
    policy.gradient.zero_()
    if len(parts) == 1:
        loss, statistics = algorithm.loss(rows, policy.forward(x))
        loss.backward()  # type: ignore[no-untyped-call]
        return as_floats(algorithm, loss, statistics)
    # The loss needs all outputs before the first backward pass. Keeping what that needs of all rows would take the
    # memory that the passes save, so the outputs are computed twice: a third more work.
    with torch.no_grad():
        whole = policy.forward_in_parts(x, parts)
    whole.require_gradients()
    loss, statistics = algorithm.loss(rows, whole)
    loss.backward()  # type: ignore[no-untyped-call]
    d_raw, d_value = whole.gradients()
    for part in parts:
        out = policy.forward(x[part])
        torch.autograd.backward([out.raw, out.value], [d_raw[part], d_value[part]])
    return as_floats(algorithm, loss, statistics)


def as_floats(algorithm: Algorithm, loss: Any, statistics: dict[str, Any]) -> dict[str, float]:
    """The statistics of a loss as numbers, in one transfer."""
    found = {**statistics, "total_loss": loss}
    if found.keys() != set(algorithm.statistics):
        raise TypeError(
            f"{type(algorithm).__name__}.loss returned {', '.join(sorted(found))}; its `statistics` name "
            f"{', '.join(sorted(algorithm.statistics))}"
        )
    values = torch.stack([torch.as_tensor(value).detach().float().to(loss.device) for value in found.values()])
    return dict(zip(found, values.tolist(), strict=True))
