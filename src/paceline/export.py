"""Export a checkpoint as one ONNX file, from the environment's observations to its actions, that runs without paceline.

This uses torch's tracing exporter. The newer one, by graph capture, needs two more packages, is tens of times slower
for networks of this size, and gives the same file.
"""

from __future__ import annotations

import copy
import io
import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.agent import Agent
from paceline.config import RunConfig, UserError
from paceline.envs.contract import close_env, same_folder
from paceline.envs.masks import random_actions
from paceline.envs.multi_agent import AgentsEnv
from paceline.models.actor_critics import MAX_LOG_STD, MIN_LOG_STD
from paceline.models.export_graph import MEMORY, NEXT_MEMORY, Graph, Port, stack_leaves
from paceline.models.masking import INVALID
from paceline.models.normalizer import CLIP
from paceline.run import checkpoint
from paceline.run.directory import replacing
from paceline.spaces import MASK, Array, space_to_json
from paceline.team_spaces import SHARED

SUFFIX = ".onnx"
OPSET = 17
CHECK_ROWS = 64
CHECK_SECONDS = 30.0
TOLERANCE = 1e-4
"""Largest difference allowed, relative to the largest number of an output or to 1: the order of sums may differ."""


class ExportError(RuntimeError):
    """The exported network differs from the policy. Nothing was written."""


@dataclass(frozen=True)
class Export:
    path: Path
    agent: Agent
    inputs: list[Port]
    outputs: list[Port]
    checked: str
    """How the file was compared with the policy, or why not."""

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
    if agent.config.multi_agent.policies != SHARED:
        raise UserError(f"{found} has several policies (multi_agent.policies), which export does not write yet")
    graph = Graph(agent.policy, value=agent.config.algorithm.has_value, deviation=agent.has_noise)
    graph.eval()
    with same_folder():
        observations, rows, source = _observe(agent)
    inputs = stack_leaves(graph, observations, rows)
    content, remarks = _trace(graph, inputs, agent.config)
    content = _add_metadata(onnx, content, graph, agent)
    checked = _check(content, graph, agent, inputs, rows, source, remarks)
    with replacing(path, binary=True) as file:
        file.write(content)
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


def _observe_team(env: AgentsEnv, agent: Agent) -> tuple[list[Any], Array, str]:
    """Observations of all agents."""
    seen: list[Any] = []
    rows: list[Array] = []
    here, infos = env.reset(seed=0)
    deadline = time.monotonic() + CHECK_SECONDS
    while len(rows) < CHECK_ROWS and time.monotonic() < deadline:
        for name, observation in here.items():
            info = infos.get(name)
            rows.append(agent.encode(observation, info.get(MASK) if isinstance(info, Mapping) else None))
            seen.append(copy.deepcopy(observation))
        result = env.step(agent.act_for(here, infos))
        here, _, over = env.after(result)
        infos = result[4]
        if over:
            here, infos = env.reset(seed=len(rows))
    return seen[:CHECK_ROWS], np.stack(rows[:CHECK_ROWS]), "observations of the environment"


def _observe(agent: Agent) -> tuple[list[Any], Array, str]:
    """Observations for the comparison, as the environment gives them and encoded, and their source. Actions alternate
    between the policy's and random ones."""
    seen: list[Any] = []
    rows: list[Array] = []
    codec, rng = agent.policy.observation, np.random.default_rng(0)
    deadline = time.monotonic() + CHECK_SECONDS
    reason = ""
    try:
        env = agent.make_env()
        try:
            if isinstance(env, AgentsEnv):
                return _observe_team(env, agent)
            env.action_space.seed(0)
            observation, info = env.reset(seed=0)
            while len(rows) < CHECK_ROWS and time.monotonic() < deadline:
                mask = agent.mask_of(env, observation, info)
                rows.append(agent.encode(observation, mask))
                seen.append(copy.deepcopy(observation))
                if len(rows) % 2 or (mask is not None and agent.policy.action.is_mixed):
                    action = agent.act(observation, mask=mask)
                elif mask is None:
                    action = env.action_space.sample()
                else:
                    action = agent.policy.action.split(random_actions(rng, mask[None], codec.mask))[0]
                observation, _, terminated, truncated, info = env.step(action)
                if terminated or truncated:
                    observation, info = env.reset()
                    agent.reset()
        finally:
            close_env(env)
    except Exception as error:  # an environment may raise anything, or be missing here
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    if rows:
        return seen, np.stack(rows), "observations of the environment"
    codec.space.seed(0)
    seen = [codec.space.sample() for _ in range(CHECK_ROWS)]
    mask = np.ones(sum(codec.mask), np.int8) if codec.mask else None
    rows = [agent.encode(observation, mask) for observation in seen]
    return seen, np.stack(rows), f"samples of the observation space (no environment: {reason})"


def _trace(graph: Graph, inputs: dict[str, Array], config: RunConfig) -> tuple[bytes, list[str]]:
    """The file, and torch's warnings: tracing fixes operations that depend on more than shapes."""
    examples = tuple(torch.from_numpy(np.concatenate([a, a])[:2]) for a in inputs.values())
    names = [port.name for port in (*graph.inputs, *graph.outputs)]
    buffer = io.BytesIO()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        try:
            torch.onnx.export(
                graph,
                examples,
                buffer,  # type: ignore[arg-type]  # the type of the other exporter; this one accepts it
                dynamo=False,
                opset_version=OPSET,
                input_names=names[: len(graph.inputs)],
                output_names=names[len(graph.inputs) :],
                dynamic_axes={name: {0: "N"} for name in names},
            )
        except Exception as error:  # torch's exporter and a user's network may raise anything
            of = f"model.class={_plain_name(config.model.class_)}" if config.model.class_ else "this network"
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{of} cannot be written as ONNX: {type(error).__name__}: {reason}") from error
    remarks = [str(w.message) for w in caught if w.category.__name__ == "TracerWarning"]
    return buffer.getvalue(), remarks


def _add_metadata(onnx: Any, content: bytes, graph: Graph, agent: Agent) -> bytes:
    """Add the origin of the network and the meaning of its inputs and outputs."""
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
            for port, leaf in zip(graph.inputs, graph.observation.leaves, strict=False)
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


def _check(
    content: bytes,
    graph: Graph,
    agent: Agent,
    inputs: dict[str, Array],
    encoded: Array,
    source: str,
    remarks: list[str],
) -> str:
    """Compare the file in onnxruntime with the policy, on all rows at once and on the first one alone."""
    try:
        runtime = import_module("onnxruntime")
    except ImportError:
        return 'no: onnxruntime is not installed here (pip install "paceline[export]")'
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        names = [port.name for port in graph.outputs]
        together = session.run(names, inputs)
        alone = session.run(names, {name: rows[:1] for name, rows in inputs.items()})
    except Exception as error:  # its errors have no common base
        reason = " ".join(str(error).split())[:300]
        raise ExportError(f"onnxruntime cannot run the exported policy: {reason}{_hint(remarks)}") from error
    worst = 0.0
    for rows, results in ((encoded, together), (encoded[:1], alone)):
        memory = inputs[MEMORY][: len(rows)] if graph.memory else None
        worst = max(worst, _compare(agent, graph, rows, memory, dict(zip(names, results, strict=True)), remarks))
    return (
        f"by onnxruntime {runtime.__version__} on {len(encoded)} {source}: the same actions, outputs within {worst:.0e}"
    )


def _compare(
    agent: Agent, graph: Graph, rows: Array, memory: Array | None, got: dict[str, Array], remarks: list[str]
) -> float:
    """The largest difference, relative as in `TOLERANCE`."""
    policy = agent.policy
    after, memory = copy.deepcopy(memory), copy.deepcopy(memory)  # acting changes it
    out, value = (np.array(a) for a in policy.outputs(rows, after))
    expected: dict[str, Array] = {graph.outputs[len(graph.actions)].name: out.T, "value": value}
    if policy.action.is_mixed:
        logits = sum(policy.action.nvec)
        expected |= {"logits": out[:logits].T, "mean": out[logits:].T}
    if after is not None:
        expected[NEXT_MEMORY] = after
    if graph.gives_log_std:
        mean, log_std = np.split(out.T, 2, axis=1)
        expected |= {"mean": mean, "log_std": np.clip(log_std, MIN_LOG_STD, MAX_LOG_STD)}
    action = policy.greedy(rows, memory)
    choices = len(policy.action.nvec)
    if policy.action.dim:
        parts = zip(policy.action.parts, graph.actions, policy.action.decode_parts(action), strict=True)
        expected |= {port.name: array for part, port, array in parts if part.start >= choices}
        if graph.deviates:
            expected["log_std"] = np.broadcast_to(policy.state()["log_std"], (len(rows), policy.action.dim))
    worst = 0.0
    for port in graph.outputs:
        if port.name not in expected:
            continue
        wanted, found = expected[port.name], got[port.name]
        if found.shape != wanted.shape:
            raise ExportError(
                f"the exported policy gives {port.name} of shape {list(found.shape)} for {len(rows)} observations "
                f"instead of {list(wanted.shape)}{_hint(remarks)}"
            )
        slack = 1.0 if port.dtype.kind in "iu" else 0.0  # rounding to whole numbers may go either way
        difference = np.abs(found.astype(np.float64) - wanted.astype(np.float64)) - slack
        relative = max(0.0, float(difference.max())) / _largest(wanted)
        if not relative <= TOLERANCE:  # also for NaN
            raise ExportError(
                f"the exported policy gives another {port.name} than the run's: it differs by {relative:.1e}, and "
                f"{TOLERANCE:.0e} is allowed{_hint(remarks)}"
            )
        worst = max(worst, relative)
    if choices:
        chosen = zip(policy.action.parts, graph.actions, strict=True)
        theirs = [got[port.name].reshape(len(rows), -1) for part, port in chosen if part.start < choices]
        _compare_choices(agent, out, action[:, :choices].astype(np.int64), np.concatenate(theirs, axis=1))
    return worst


def _compare_choices(agent: Agent, out: Array, ours: Array, got: Array) -> None:
    """Require the same choices, except where two are equally good. `got`: in the units of the environment."""
    codec = agent.policy.action
    theirs = got.astype(np.int64) - codec.offset
    slack = TOLERANCE * _largest(out)
    starts = np.concatenate(([0], np.cumsum(codec.nvec)[:-1]))
    for row, choice in zip(*np.nonzero(ours != theirs), strict=True):
        best, other = (out[starts[choice] + a[row, choice], row] for a in (ours, theirs))
        if best - other > slack:
            run_takes = ours[row] + codec.offset
            raise ExportError(f"the exported policy takes action {got[row]} where the run's takes {run_takes}")


def _largest(numbers: Array) -> float:
    """The size of the largest number, at least 1, without those of invalid actions."""
    return float(np.abs(np.where(numbers == INVALID, 0, numbers)).max(initial=1.0))


def _hint(remarks: list[str]) -> str:
    return f"; torch said: {' '.join(remarks[0].split())[:200]}" if remarks else ""


def _plain_name(name: str) -> str:
    """Without folders of this machine."""
    path, sign, attribute = name.rpartition(":")
    return f"{Path(path).name}:{attribute}" if sign and path.endswith(".py") else name
