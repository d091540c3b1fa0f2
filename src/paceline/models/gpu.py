"""The network on a GPU: images and discrete actions, 16-bit convolutions, one CUDA graph for acting.

Everything here also runs on the CPU, in 32 bits and without graphs: that is how it is tested where there is no GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.config import ModelConfig, UserError
from paceline.models.masking import masked_tensor
from paceline.models.nets import CnnActorCritic
from paceline.models.numpy_mlp import Floats
from paceline.models.outputs import Outputs
from paceline.models.policy import Policy, flatten
from paceline.spaces import ActionCodec, Array, ObservationCodec

ROWS_STEP = 128
WARM_UP = 3  # runs before a graph is captured: libraries choose their algorithms in the first


def find_device(wanted: str, observation: ObservationCodec, action: ActionCodec, inputs: str = "images") -> str:
    """`cpu` or `cuda`, with `auto` resolved: a GPU is used for convolutions only, unless it is asked for. `inputs`:
    what the algorithm learns from on a GPU."""
    if wanted == "cpu" or (wanted == "auto" and inputs != "images"):
        return "cpu"
    available, images, discrete = (
        torch.cuda.is_available(),
        observation.is_image,
        action.shape == (1,) and not action.dim,
    )
    if wanted == "auto":
        return "cuda" if available and images and discrete else "cpu"
    if not available:
        why = "this PyTorch finds no GPU" if torch.version.cuda else "this PyTorch was built for the CPU only"
        raise UserError(f"engine.device=cuda: {why}; use --device auto, or install a PyTorch with CUDA (pytorch.org)")
    if inputs == "images" and not (images and discrete):
        what = f"the env has {action.space}" if images else "the observation is not an image"
        raise UserError(f"engine.device=cuda is for images and one Discrete action, but {what}: use --device cpu")
    return "cuda"


class DeviceRows:
    """A selection of frames on a device that is gathered when it is used."""

    def __init__(self, frames: Tensor, index: Tensor) -> None:
        self.frames, self.index = frames, index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, order: Any) -> DeviceRows:
        if isinstance(order, np.ndarray):
            order = torch.from_numpy(order).to(self.index.device)
        return DeviceRows(self.frames, self.index[order])

    def gather(self) -> Tensor:
        return self.frames.index_select(0, self.index)


class GpuPolicy(Policy):
    """A policy whose network is on a GPU. It takes observations as `DeviceRows`, a tensor or an array."""

    is_gpu = True

    def __init__(
        self,
        observation: ObservationCodec,
        action: ActionCodec,
        config: ModelConfig,
        *,
        device: str,
        seed: int = 0,
        compiled: bool = False,
        extra: Callable[[], nn.Module | None] = lambda: None,
    ) -> None:
        super().__init__(observation, action, config, seed=seed, extra=extra)
        self.device, self.accelerate, self.fast = torch.device(device), False, None
        self.net.to(self.device)
        if self.extra is not None:
            self.extra.to(self.device)
        if isinstance(self.net, CnnActorCritic):
            self.net.half_precision = self.device.type == "cuda"
        self.acting_net = copy.deepcopy(self.net).requires_grad_(False).eval()
        """A copy with its own weights, for `Acting`."""
        self._log_std = nn.Parameter(self._log_std.detach().to(self.device))
        self.parameters, self.gradient = flatten(self.trained())
        for net in (self.net, self.acting_net) if compiled else ():
            if isinstance(net, CnnActorCritic):
                net.compile_convolutions()
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            torch.backends.cuda.matmul.allow_tf32 = True

    def forward(self, x: Any) -> Outputs:
        """The rows are padded to one of a few sizes, because each size is compiled separately."""
        rows = len(x)
        fill = np.arange(-(-rows // ROWS_STEP) * ROWS_STEP) % rows
        out, value = (outputs[:rows] for outputs in self._run(x[fill]))
        return Outputs(out, value, self.action, self._log_std)

    def forward_padded(self, x: Tensor) -> Outputs:
        """The outputs for all rows of `x`, whose number is always the same."""
        return Outputs(*self._run(x), self.action, self._log_std)

    def _run(self, x: Any, *, plainly: bool = False) -> tuple[Tensor, Tensor]:
        """Policy outputs `[B, K]` and values `[B]`, in 32 bits; `plainly`: not compiled, for any number of rows."""
        if isinstance(x, DeviceRows):
            x = x.gather()
        elif not isinstance(x, Tensor):
            x = torch.from_numpy(np.ascontiguousarray(x)).to(self.device)
        inputs, mask = self.observation.split(x)
        if plainly and isinstance(self.net, CnnActorCritic):
            out, value = self.net.run(inputs, self.net.convolutions)
        else:
            self.set_training(not plainly)
            out, value = self.net(inputs)
        return masked_tensor(out, mask), value

    def passes(self, rows: int) -> list[slice]:
        """One pass: a GPU has the memory."""
        return [slice(0, rows)]

    def _infer(self, x: Any) -> tuple[Floats, Floats]:
        with torch.inference_mode():
            out, value = self._run(x, plainly=True)
        return out.cpu().numpy().T, value.cpu().numpy()


class Acting:
    """Actions, log-probabilities and values for `rows` observations at a time, with the weights of the last `publish`,
    so that it can act while the policy learns."""

    def __init__(self, policy: GpuPolicy, rows: int) -> None:
        device, observation = policy.device, policy.observation
        self._policy = policy
        self._net = policy.acting_net
        if isinstance(self._net, CnnActorCritic) and self._net.half_precision:
            self._net.convolutions.to(torch.bfloat16)  # otherwise they would be cast at every step
        dtype = torch.from_numpy(np.zeros(1, observation.dtype)).dtype
        self.obs = torch.zeros(rows, *observation.shape, dtype=dtype, device=device)
        self.noise = torch.zeros(rows, policy.action.num_outputs, device=device)
        self.action = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logp = torch.zeros(rows, device=device)
        self.value = torch.zeros(rows, device=device)
        self.publish()
        self.run = captured(self._run) if device.type == "cuda" else self._run

    @torch.no_grad()
    def publish(self) -> None:
        """Take over the policy's weights, and its buffers, such as the statistics of a batch normalisation."""
        net = self._policy.net
        ours, theirs = ([*module.parameters(), *module.buffers()] for module in (self._net, net))
        for own, given in zip(ours, theirs, strict=True):
            own.copy_(given)

    @torch.no_grad()
    def _run(self) -> None:
        inputs, mask = self._policy.observation.split(self.obs)
        out, value = self._net(inputs)
        out = masked_tensor(out, mask)
        action = (out + self.noise).argmax(1)
        self.action.copy_(action)
        self.logp.copy_(torch.log_softmax(out, 1).gather(1, action[:, None])[:, 0])
        self.value.copy_(value)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """`work` as one CUDA graph: one launch instead of hundreds. It must read and write the same memory each time,
    and is run a few times now.

    It is captured on a stream of its own. cuBLAS has a workspace for each stream, and a graph keeps the one of where it
    was captured: two graphs with the same one must not run at once, as acting and learning do.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph.replay


def pinned(array: Array) -> tuple[Tensor, Array]:
    """A tensor like `array` in pinned memory, for asynchronous copies to the device, and the same memory as an
    array."""
    tensor = torch.from_numpy(np.zeros_like(array))
    if torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor, tensor.numpy()
