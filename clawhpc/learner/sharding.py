"""Networks in shards, one on each rank: FSDP2 through Lightning's ModelParallelStrategy.

A checkpoint is one file that rank 0 writes, the same whatever the number of ranks, so a run may go on with another
number of them. Mixed precision is FSDP's too, with a group of one rank where there are no others: weights, gradients
and optimizer are in fp32, and a layer is gathered and computed in bf16, experts included, which autocast leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers.modeling_layers import GradientCheckpointingLayer

from clawhpc.learner.networks import ValueHead
from clawhpc.learner.ranks import Ranks

IN_FP32 = MixedPrecisionPolicy(cast_forward_inputs=False)
IN_BF16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
"""The embedding begins in bf16. FSDP's cast of inputs would make a new `TreeLayout` for each layer."""


def shard(network: nn.Module, mesh: DeviceMesh, ranks: Ranks, *, bf16: bool) -> None:
    """Leave on each rank of `mesh` its part of rank 0's `network`; a gradient is the sum over all ranks.

    What the others give is on the meta device: rank 0 hands out the weights, one parameter at a time. `network` is to
    be called as a whole, on all ranks at once: its layers are gathered one at a time, and all else around them; in
    `bf16`, but for a value head. What it returns must be tensors, or tuples of them, and no view of another tensor.
    """
    whole = {name: parameter.detach() for name, parameter in network.named_parameters()}
    for module in list(network.modules()):
        if isinstance(module, ValueHead):
            fully_shard(module, mesh=mesh, mp_policy=IN_FP32)
        elif isinstance(module, GradientCheckpointingLayer):  # transformers' word for a layer of a backbone
            fully_shard(module, mesh=mesh, mp_policy=IN_BF16 if bf16 else IN_FP32)
    fully_shard(network, mesh=mesh, mp_policy=IN_BF16 if bf16 else IN_FP32)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the weights of the loss have the step's denominator already
            module.set_force_sum_reduction_for_comms(True)
    if ranks.size > 1:
        _make_room(network, torch.device(mesh.device_type))
        _hand_out(network, whole, ranks)


def _make_room(network: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device memory on `device`; a tied parameter stays one, which `to_empty` would part."""
    made: dict[Tensor, Tensor] = {}
    for module in network.modules():
        parameters, buffers = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        for name, tensor in [*parameters, *buffers]:
            if tensor.is_meta and tensor not in made:
                room = torch.empty_like(tensor, device=device)
                trained = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(room, requires_grad=tensor.requires_grad) if trained else room
            setattr(module, name, made.get(tensor, tensor))


@torch.no_grad()
def _hand_out(network: nn.Module, whole: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Every rank gets its part of rank 0's parameters, which are `whole` there, and a copy of its buffers."""
    for name, part in network.named_parameters():
        assert isinstance(part, DTensor)
        given = whole[name].to(part.device) if ranks.first else torch.empty(part.shape, device=part.device)
        part.copy_(distribute_tensor(given, part.device_mesh, part.placements))
    for buffer in network.buffers():
        dist.broadcast(buffer, src=0)


def clip_gradients(parameters: Iterable[nn.Parameter], bound: float) -> float:
    """Scale the gradients of `parameters`, of all ranks together, to a norm of at most `bound`; what it was before."""
    norm = nn.utils.clip_grad_norm_(parameters, bound)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def full_weights(module: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """On rank 0 the parameters of `module` whole, on the CPU, a tied one once; on the others nothing. All must call."""
    shards = module.state_dict()
    return _known({name: full_tensor(shards[name], ranks) for name, _ in module.named_parameters()})


def full_tensor(tensor: Tensor, ranks: Ranks) -> Tensor | None:
    """On rank 0 the whole of a tensor, on the CPU; None on the others."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu() if ranks.first else None


def _known(values: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if value is not None}


def _like(whole: Tensor, example: Tensor) -> Tensor:
    """`whole` on the device of `example`, and in shards if that is."""
    moved = whole.to(example.device)
    if not isinstance(example, DTensor):
        return moved
    return distribute_tensor(moved, example.device_mesh, example.placements, src_data_rank=None)  # all have the whole


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks of a group that exists already, with checkpoints as one process writes them.

    Lightning's own save and load go through torch.distributed.checkpoint, which gives an optimizer without a state one
    by a step with zero gradients: where a step had nothing to teach, one rank and two would differ after it.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(data_parallel_size=ranks.size, tensor_parallel_size=1, save_distributed_checkpoint=False)
        self._ranks = ranks

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """On rank 0 whole, on the others empty. What has two names, as a tied embedding, is one tensor there too."""
        assert self.model is not None
        named = self.model.state_dict(keep_vars=True)  # else each name has a tensor of its own
        whole = {value: full_tensor(value.detach(), self._ranks) for value in dict.fromkeys(named.values())}
        return _known({name: whole[value] for name, value in named.items()})

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As of one process: by the number of the parameter."""
        packed = optimizer.state_dict()
        state = {
            number: _known({name: full_tensor(value, self._ranks) for name, value in slots.items()})
            for number, slots in packed["state"].items()
        }
        return packed | {"state": state}

    @torch.no_grad()
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Each rank reads its part of the file."""
        # It is our own: `weights_only` is not what `fit` was told, which Lightning does not hand on.
        checkpoint = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=False)
        assert self.model is not None
        weights = checkpoint.pop("state_dict")
        for name, value in self.model.state_dict().items():
            value.copy_(_like(weights[name], value))
        for optimizer, packed in zip(self.optimizers, checkpoint.pop("optimizer_states"), strict=True):
            _load_optimizer(optimizer, packed)
        return checkpoint


def _load_optimizer(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    parameter_of = dict(zip(numbers, parameters, strict=True))
    state = {
        number: {name: _slot(value, parameter_of[number]) for name, value in slots.items()}
        for number, slots in packed["state"].items()
    }
    optimizer.load_state_dict(packed | {"state": state})


def _slot(value: Tensor, parameter: Tensor) -> Tensor:
    """AdamW keeps two moments for each element of a parameter, and a count for all."""
    return _like(value, parameter) if value.shape == parameter.shape else value


class RankEnvironment(ClusterEnvironment):
    """Tells Lightning which rank this is. All ranks are there, and have met."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        """Not asked for where the group exists."""
        raise NotImplementedError

    @property
    def main_port(self) -> int:
        """Not asked for where the group exists."""
        raise NotImplementedError

    @staticmethod
    def detect() -> bool:
        """It is given, never guessed."""
        return False

    def world_size(self) -> int:
        """Ranks on all hosts."""
        return self._ranks.size

    def set_world_size(self, size: int) -> None:
        """It is given."""

    def global_rank(self) -> int:
        """Among those on all hosts."""
        return self._ranks.rank

    def set_global_rank(self, rank: int) -> None:
        """It is given."""

    def local_rank(self) -> int:
        """On this host."""
        return self._ranks.local_rank

    def node_rank(self) -> int:
        """Of this host."""
        return self._ranks.host_rank
