"""Action masks on the outputs of a network.

The output of an invalid action becomes `INVALID`, so its probability and its gradient are exactly 0, it adds nothing to
the entropy, and no maximum finds it. It is finite because 0 times infinity is not a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.lazy import torch
from paceline.spaces import Array

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float32]
INVALID = -1e9


def masked(out: Floats, mask: Array | None) -> Floats:
    """Outputs `[K, B]` under masks `[B, K]`, which may be shorter: numbers after the choices have none."""
    if mask is None:
        return out
    count = mask.shape[1]
    choices = np.where(mask.T != 0, out[:count], np.float32(INVALID))
    return choices if count == len(out) else np.concatenate([choices, out[count:]])


def masked_tensor(out: Tensor, mask: Any) -> Tensor:
    """The same for outputs `[B, K]`."""
    if mask is None:
        return out
    count = mask.shape[1]
    choices = torch.where(mask != 0, out[:, :count], INVALID)
    return choices if count == out.shape[1] else torch.cat([choices, out[:, count:]], 1)
