"""A checkpoint → one ONNX file that needs nothing of ours: observations of the environment in, its actions out.

Torch's exporter by tracing is used. The newer one, by graph capture, wants two more packages, is tens of times slower
for networks of this size, and gives the same file.
"""

from __future__ import annotations

import copy
import io
import json
import os
import time
import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.agent import Agent
from paceline.config import RunConfig, UserError
from paceline.model.graph import Graph, Port, stack_leaves
from paceline.model.normalizer import CLIP
from paceline.run import checkpoint
from paceline.spaces import Array, space_to_json

SUFFIX = ".onnx"
OPSET = 17
CHECK_ROWS = 64
CHECK_SECONDS = 30.0
TOLERANCE = 1e-4
"""Of the largest number of an output, or of 1: what another order of the same sums may differ by."""


class ExportError(RuntimeError):
    """The file would not do what the policy does. Nothing was written."""


@dataclass(frozen=True)
class Export:
    path: Path
    agent: Agent
    inputs: list[Port]
    outputs: list[Port]
    checked: str
    """How the file was compared with the policy, or why it was not."""

    def text(self) -> str:
        config, steps = self.agent.config, self.agent.counters["env_steps"]
        lines = [f"policy     {_plain_name(config.env.id)}, {config.algo}, {steps:,} steps ({self.agent.path})"]
        lines += [f"input      {port}" for port in self.inputs]
        lines += [f"output     {port}: {port.meaning}" for port in self.outputs]
        size = self.path.stat().st_size
        return "\n".join([*lines, f"checked    {self.checked}", f"written    {self.path} ({size / 1000:,.0f} kB)"])


def export(target: str | Path, output: str | Path | None = None, *, which: str | None = None) -> Export:
    """Write the policy of a run or a checkpoint to `output`, by default `policy.onnx` in the run."""
    onnx = _import_onnx()
    found = checkpoint.find(target, which)
    path = _path(output, found)
    agent = Agent(found)
    graph = Graph(agent.policy, value=agent.config.algo != "sac", deviation=agent.has_noise)
    graph.eval()
    observations, source = _observe(agent)
    content, remarks = _trace(graph, observations, agent.config)
    content = _finish(onnx, content, graph, agent)
    checked = _check(content, graph, agent, observations, source, remarks)
    _write(path, content)
    return Export(path, agent, graph.inputs, graph.outputs, checked)


def _import_onnx() -> Any:
    try:
        return import_module("onnx")
    except ImportError:
        raise UserError('--format onnx needs the package onnx: pip install "paceline[export]"') from None


def _path(output: str | Path | None, found: Path) -> Path:
    run = found.parent.parent
    if output is None:
        path = (run if (run / "config.yaml").is_file() else Path()) / f"policy{SUFFIX}"
    else:
        path = Path(output).expanduser()
    if path.suffix.lower() != SUFFIX:
        raise UserError(f"--output {path}: the name must end in {SUFFIX}")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.resolve().parent}")
    if path.is_dir():
        raise UserError(f"--output {path}: this is a folder; name a file in it")
    return path


def _observe(agent: Agent) -> tuple[list[Any], str]:
    """Observations to compare with, and where they are from: every second action is the policy's, the others random."""
    rows: list[Any] = []
    deadline = time.monotonic() + CHECK_SECONDS
    reason = ""
    try:
        env = agent.make_env()
        try:
            env.action_space.seed(0)
            observation, _ = env.reset(seed=0)
            rows.append(copy.deepcopy(observation))
            while len(rows) < CHECK_ROWS and time.monotonic() < deadline:
                action = agent.act(observation) if len(rows) % 2 else env.action_space.sample()
                observation, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    observation, _ = env.reset()
                rows.append(copy.deepcopy(observation))
        finally:
            env.close()  # type: ignore[no-untyped-call]
    except Exception as error:  # an environment may raise anything, and may not be installed here
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    if rows:
        return rows, "observations of the environment"
    space = agent.policy.observation.space
    space.seed(0)
    return [space.sample() for _ in range(CHECK_ROWS)], f"samples of the observation space (no environment: {reason})"


def _trace(graph: Graph, observations: list[Any], config: RunConfig) -> tuple[bytes, list[str]]:
    """The file, and what torch had to say: operations that depend on more than the shapes are fixed by tracing."""
    examples = tuple(torch.from_numpy(a) for a in stack_leaves(graph, (observations * 2)[:2]).values())
    names = [port.name for port in (*graph.inputs, *graph.outputs)]
    buffer = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        try:
            torch.onnx.export(
                graph,
                examples,
                buffer,  # type: ignore[arg-type]  # said of the other exporter; this one takes it
                dynamo=False,
                opset_version=OPSET,
                input_names=names[: len(graph.inputs)],
                output_names=names[len(graph.inputs) :],
                dynamic_axes={name: {0: "N"} for name in names},
            )
        except Exception as error:  # torch's exporter and a user's network raise what they like
            of = f"model.class={_plain_name(config.model.class_)}" if config.model.class_ else "this network"
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{of} cannot be written as ONNX: {type(error).__name__}: {reason}") from error
    remarks = [str(w.message) for w in caught if w.category.__name__ == "TracerWarning"]
    return buffer.getvalue(), remarks


def _finish(onnx: Any, content: bytes, graph: Graph, agent: Agent) -> bytes:
    """With who made it, of what, and what its inputs and outputs are."""
    model = onnx.load_model_from_string(content)
    model.producer_name, model.producer_version = "paceline", version("paceline")
    config = agent.config
    for info, port in zip((*model.graph.input, *model.graph.output), (*graph.inputs, *graph.outputs), strict=True):
        info.doc_string = port.meaning
    model.graph.name = "policy"
    for node in model.graph.node:
        node.doc_string = ""
    wrappers = [w if isinstance(w, str) else next(iter(w)) for w in config.env.wrappers]
    preprocessing = {
        "normalized": agent.policy.moments is not None,
        "clipped_to": CLIP if agent.policy.moments is not None else None,
        "images_divided_by": {
            port.name: leaf.scale
            for port, leaf in zip(graph.inputs, graph.observation.leaves, strict=True)
            if leaf.kind == "image" and leaf.scale != 1.0
        },
    }
    properties = {
        "paceline_version": version("paceline"),
        "env": _plain_name(config.env.id),
        "env_wrappers": [_plain_name(name) for name in wrappers],
        "env_frame_stack": config.env.frame_stack,
        "algo": config.algo,
        "env_steps": agent.counters["env_steps"],
        "observation_space": space_to_json(agent.policy.observation.space),
        "action_space": space_to_json(agent.policy.action.space),
        "squash": agent.policy.action.squash,
        "preprocessing": preprocessing,
        "inputs": {port.name: _describe(port) for port in graph.inputs},
        "outputs": {port.name: _describe(port) for port in graph.outputs},
    }
    onnx.helper.set_model_props(
        model, {key: value if isinstance(value, str) else json.dumps(value) for key, value in properties.items()}
    )
    onnx.checker.check_model(model, full_check=True)
    serialized: bytes = model.SerializeToString()
    return serialized


def _describe(port: Port) -> dict[str, Any]:
    return {"dtype": str(port.dtype), "shape": ["N", *port.shape], "meaning": port.meaning}


def _check(content: bytes, graph: Graph, agent: Agent, observations: list[Any], source: str, remarks: list[str]) -> str:
    """The file run by onnxruntime against the policy, all rows at once and the first one alone."""
    try:
        runtime = import_module("onnxruntime")
    except ImportError:
        return 'no: onnxruntime is not installed here (pip install "paceline[export]")'
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        inputs = stack_leaves(graph, observations)
        names = [port.name for port in graph.outputs]
        together = session.run(names, inputs)
        alone = session.run(names, {name: rows[:1] for name, rows in inputs.items()})
    except Exception as error:  # its errors have no common base
        reason = " ".join(str(error).split())[:300]
        raise ExportError(f"onnxruntime cannot run the exported policy: {reason}{_hint(remarks)}") from error
    codec = agent.policy.observation
    encoded = np.zeros((len(observations), *codec.shape), codec.dtype)
    for row, observation in zip(encoded, observations, strict=True):
        codec.encode_one(observation, row)
    worst = 0.0
    for rows, results in ((encoded, together), (encoded[:1], alone)):
        worst = max(worst, _compare(agent, graph, rows, dict(zip(names, results, strict=True)), remarks))
    return (
        f"by onnxruntime {runtime.__version__} on {len(observations)} {source}: the same actions, outputs within "
        f"{worst:.0e}"
    )


def _compare(agent: Agent, graph: Graph, rows: Array, got: dict[str, Array], remarks: list[str]) -> float:
    """The largest difference, of the largest number of an output or of 1."""
    policy = agent.policy
    out, value = (np.array(a) for a in policy.outputs(rows))
    expected: dict[str, Array] = {graph.outputs[1].name: out.T, "value": value}
    action = policy.action.decode(policy.best(rows))
    if policy.action.is_continuous:
        expected["action"] = action
        if graph.deviates:
            expected["log_std"] = np.broadcast_to(policy.state()["log_std"], out.T.shape)
    worst = 0.0
    for port in graph.outputs:
        if port.name not in expected:
            continue
        wanted, found = expected[port.name], got[port.name]
        if found.shape != wanted.shape:
            raise ExportError(
                f"the exported policy gives {port.name} of shape {list(found.shape)} for {len(rows)} observations, "
                f"{list(wanted.shape)} is right{_hint(remarks)}"
            )
        slack = 1.0 if port.dtype.kind in "iu" else 0.0  # a whole number is cut off, and may fall on either side
        difference = np.abs(found.astype(np.float64) - wanted.astype(np.float64)) - slack
        relative = max(0.0, float(difference.max())) / max(1.0, float(np.abs(wanted).max()))
        if not relative <= TOLERANCE:  # nor NaN
            raise ExportError(
                f"the exported policy gives another {port.name} than the run's: off by {relative:.1e} of it, "
                f"{TOLERANCE:.0e} is allowed{_hint(remarks)}"
            )
        worst = max(worst, relative)
    if not policy.action.is_continuous:
        _compare_choices(agent, out, action, got["action"])
    return worst


def _compare_choices(agent: Agent, out: Array, wanted: Array, got: Array) -> None:
    """The same, but where two are as good as each other."""
    codec = agent.policy.action
    ours, theirs = (a.reshape(len(a), -1).astype(np.int64) - codec.offset for a in (wanted, got))
    slack = TOLERANCE * max(1.0, float(np.abs(out).max()))
    starts = np.concatenate(([0], np.cumsum(codec.nvec)[:-1]))
    for row, choice in zip(*np.nonzero(ours != theirs), strict=True):
        best, other = (out[starts[choice] + a[row, choice], row] for a in (ours, theirs))
        if best - other > slack:
            raise ExportError(f"the exported policy takes action {got[row]} where the run's takes {wanted[row]}")


def _hint(remarks: list[str]) -> str:
    return f"; torch said: {' '.join(remarks[0].split())[:200]}" if remarks else ""


def _plain_name(name: str) -> str:
    """Without the folders of this machine."""
    path, sign, attribute = name.rpartition(":")
    return f"{Path(path).name}:{attribute}" if sign and path.endswith(".py") else name


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
