"""A network for tests that writes down what was learned from: imported, it makes every update of its process leave a
line with the observations of the rows in it. With `paceline/Numbered-v0` these say which transitions they were.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.algo.a3c import A3C
from paceline.algo.base import Algorithm

FOLDER = Path(os.environ.get("PACELINE_AUDIT", "audit"))


class Net(nn.Module):
    def __init__(self, observation_shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(observation_shape[0], outputs + 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(torch.tanh(x * 1e-6))
        return out[:, :-1], out[:, -1]


def write(algorithm: Algorithm, rows: Any) -> None:
    FOLDER.mkdir(exist_ok=True)
    line = {"version": algorithm.version, "generation": algorithm.group.generation, "rows": np.asarray(rows).tolist()}
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def audit() -> None:
    finish, contribution, apply = Algorithm.finish, A3C.contribution, A3C.apply_contribution

    def audited_finish(self: Algorithm, batch: Any, *rest: Any) -> Any:
        result = finish(self, batch, *rest)
        write(self, batch.obs[:-1][batch.valid])
        return result

    def audited_contribution(self: A3C, batch: Any) -> Any:
        return {**contribution(self, batch), "audit": batch.obs[:-1][batch.valid].copy()}

    def audited_apply(self: A3C, given: Any, *rest: Any) -> Any:
        rows = given["audit"]
        result = apply(self, {name: value for name, value in given.items() if name != "audit"}, *rest)
        write(self, rows)
        return result

    Algorithm.finish = audited_finish  # type: ignore[method-assign]
    A3C.contribution, A3C.apply_contribution = audited_contribution, audited_apply  # type: ignore[method-assign,assignment]


if not hasattr(Algorithm, "audited"):
    Algorithm.audited = True  # type: ignore[attr-defined]
    audit()


def read(folder: Path) -> list[tuple[float, ...]]:
    """The rows that count: of each version those of its last attempt."""
    lines: list[dict[str, Any]] = []
    for path in folder.glob("*.jsonl"):
        for text in path.read_text().splitlines():
            if text.endswith("}"):  # a process killed while it wrote leaves half a line, of an attempt that failed
                lines.append(json.loads(text))
    last: dict[int, int] = {}
    for line in lines:
        last[line["version"]] = max(last.get(line["version"], 0), line["generation"])
    return [tuple(row) for line in lines if line["generation"] == last[line["version"]] for row in line["rows"]]
