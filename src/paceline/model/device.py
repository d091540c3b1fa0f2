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
from paceline.model.fast import Floats, JointLoss
from paceline.model.nets import CnnActorCritic
from paceline.model.policy import Policy, flatten
from paceline.spaces import ActionCodec, Array, ObservationCodec

ROWS_STEP = 128
WARM_UP = 3  # runs before a graph is captured: libraries choose their algorithms in the first


def find_device(wanted: str, observation: ObservationCodec, action: ActionCodec) -> str:
    """`cpu` or `cuda`, where `auto` is left to us: a GPU pays for convolutions only."""
    if wanted == "cpu":
        return "cpu"
    available, images, discrete = torch.cuda.is_available(), observation.is_image, len(action.nvec) == 1
    if wanted == "auto":
        return "cuda" if available and images and discrete else "cpu"
    if not available:
        why = "this PyTorch finds no GPU" if torch.version.cuda else "this PyTorch was built for the CPU only"
        raise UserError(f"engine.device=cuda: {why}; use --device auto, or install a PyTorch with CUDA (pytorch.org)")
    if not images or not discrete:
        what = f"the env has {action.space}" if images else "the observation is no image"
        raise UserError(f"engine.device=cuda is for images and one Discrete action, and {what}: use --device cpu")
    return "cuda"


class DeviceRows:
    """Some of the frames on a device, not yet gathered."""

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


class DevicePolicy(Policy):
    """`x` is what a network on the device takes: rows that are there already (`DeviceRows`), a tensor, or an array."""

    def __init__(
        self,
        observation: ObservationCodec,
        action: ActionCodec,
        config: ModelConfig,
        *,
        device: str,
        seed: int = 0,
        compiled: bool = False,
    ) -> None:
        super().__init__(observation, action, config, seed=seed)
        self.device = torch.device(device)
        self.net.to(self.device)
        if isinstance(self.net, CnnActorCritic):
            self.net.half_precision = self.device.type == "cuda"
        self.acting_net = copy.deepcopy(self.net).requires_grad_(False)
        """With weights of its own, for `Acting`."""
        self._log_std = nn.Parameter(self._log_std.detach().to(self.device))
        self.parameters, self.gradient = flatten([self._log_std, *self.net.parameters()])
        for net in (self.net, self.acting_net) if compiled else ():
            if isinstance(net, CnnActorCritic):
                net.compile_convolutions()
        if self.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            torch.backends.cuda.matmul.allow_tf32 = True

    def forward(self, x: Any, *, plainly: bool = False) -> tuple[Tensor, Tensor]:
        """Policy outputs `[B, K]` and values `[B]`, in 32 bits; `plainly`: not compiled, for any number of rows."""
        if isinstance(x, DeviceRows):
            x = x.gather()
        elif not isinstance(x, Tensor):
            x = torch.from_numpy(np.ascontiguousarray(x)).to(self.device)
        if plainly and isinstance(self.net, CnnActorCritic):
            return self.net.run(x, self.net.convolutions)
        out, value = self.net(x)
        return out, value

    def passes(self, rows: int) -> list[slice]:
        """One: a GPU has the memory."""
        return [slice(0, rows)]

    def _learn_in_torch(self, x: Any, loss: JointLoss, *, add: bool = False) -> None:
        # Filled up to one of few sizes, with rows that nothing is learned from: each size is compiled by itself.
        rows = len(x)
        fill = np.arange(-(-rows // ROWS_STEP) * ROWS_STEP) % rows
        out, value = (outputs[:rows] for outputs in self.forward(x[fill]))
        d_out, d_value = loss(out.detach().cpu().numpy().T, value.detach().cpu().numpy())
        if not add:
            self.gradient.zero_()
        gradients = [torch.from_numpy(np.ascontiguousarray(d)).to(self.device) for d in (d_out.T, d_value)]
        torch.autograd.backward([out, value], gradients)

    def _infer(self, x: Any) -> tuple[Floats, Floats]:
        with torch.inference_mode():
            out, value = self.forward(x, plainly=True)
        return out.cpu().numpy().T, value.cpu().numpy()


class Acting:
    """Actions, log-probabilities and values for `rows` observations at a time, with the weights of the last `publish`:
    it can act while the policy learns."""

    def __init__(self, policy: DevicePolicy, rows: int) -> None:
        device, observation = policy.device, policy.observation
        self._policy = policy
        self._net = policy.acting_net
        if isinstance(self._net, CnnActorCritic) and self._net.half_precision:
            self._net.convolutions.to(torch.bfloat16)  # else they would be cast at every step
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
        """Take over the policy's weights."""
        for own, given in zip(self._net.parameters(), self._policy.net.parameters(), strict=True):
            own.copy_(given)

    @torch.no_grad()
    def _run(self) -> None:
        out, value = self._net(self.obs)
        action = (out + self.noise).argmax(1)
        self.action.copy_(action)
        self.logp.copy_(torch.log_softmax(out, 1).gather(1, action[:, None])[:, 0])
        self.value.copy_(value)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """The same work as one CUDA graph: a launch instead of hundreds. It must read and write the same memory each time,
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
    """A tensor like `array` from which a copy to the device need not be waited for, and the same memory as an array."""
    tensor = torch.from_numpy(np.zeros_like(array))
    if torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor, tensor.numpy()
