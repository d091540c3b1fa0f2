"""What `paceline envs check` needs to test an environment with action masks."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from paceline.envs.masks import MaskReader, find_masks
from paceline.envs.vector import Env
from paceline.spaces import ActionCodec


class ValidActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Checks every mask, and replaces an invalid action by the next valid one: an env may raise an error for it.

    Without a `reader` it finds out at the first reset whether there are masks."""

    def __init__(self, env: Env, codec: ActionCodec, reader: MaskReader | None = None) -> None:
        super().__init__(env)
        self.reader, self._codec = reader, codec
        self._is_known = reader is not None
        self._mask = np.ones((1, sum(codec.nvec)))
        self._steps = self._masks = 0
        self._allowed = 0.0
        self.taken: Any = None
        """The last action, which may be another than the one given."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, **({} if options is None else {"options": options}))
        self._steps = 0
        if isinstance(result, tuple) and len(result) == 2:
            if not self._is_known:
                self.reader, self._is_known = find_masks(self.env, self._codec, result[1]), True
            self._read(*result)
        return result

    def step(self, action: Any) -> Any:
        self.taken = action if self.reader is None else self._valid(self.reader, action)
        result = self.env.step(self.taken)
        self._steps += 1
        if isinstance(result, tuple) and len(result) == 5 and not result[2]:
            self._read(result[0], result[4])
        return result

    def describe(self) -> str:
        assert self.reader is not None
        return f"{self.reader.where}, {self._allowed / max(self._masks, 1):.0%} of the actions valid"

    def _valid(self, reader: MaskReader, action: Any) -> Any:
        index = self._codec.encode(action)
        for choice, (start, count) in enumerate(zip(reader.starts, reader.nvec, strict=True)):
            valid = np.flatnonzero(self._mask[0, start : start + count])
            index[choice] = valid[np.searchsorted(valid, index[choice]) % len(valid)]
        return self._codec.split(index[None])[0]

    def _read(self, observation: Any, info: dict[str, Any]) -> None:
        if self.reader is None:
            return
        when = f"at step {self._steps} of an episode" if self._steps else "at the start of an episode"
        self._mask = self.reader.read(self.env, observation, info, lambda: when)[None]
        self.reader.check(self._mask, lambda _: when)
        self._masks += 1
        self._allowed += float(np.mean(self._mask))
