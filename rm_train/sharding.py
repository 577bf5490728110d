"""Training with weights, gradients and optimizer state divided among the processes: FSDP2, torch's ``fully_shard``.

Invariant: every process computes as many forward passes as every other, for each of them gathers weights from all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from rm_core.network import RewardNetwork
from rm_core.tree_support import batches_by_rope_regime
from rm_train.batching import split_by_tokens
from rm_train.config import FitConfig
from rm_train.config_file import ConfigError


def check_launch(config: FitConfig, accelerator: Accelerator) -> None:
    """Raise ConfigError where the processes were started for another way of training than ours."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ConfigError(
            f"the launcher asks for {kind.value}, which is not used here: launch plain processes (torchrun, or "
            "accelerate launch --multi_gpu) and set train.shard: true"
        )
    if config.train.shard and accelerator.num_processes == 1:
        raise ConfigError("train.shard: there is one process, and nothing to divide; start several with torchrun")


def shard(network: RewardNetwork, accelerator: Accelerator) -> None:
    """Divide the weights, layer by layer. Parameters become DTensors: build the optimizer afterwards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if len(batches_by_rope_regime(network.backbone.config, [range(1), range(2**31)])) > 1:
        raise ConfigError("train.shard: this model's rotary frequencies depend on the longest sequence of a batch")
    network.unfuse("its weights are divided among the processes")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for layer in _layers(network.backbone):
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)


def _layers(backbone: Any) -> nn.ModuleList:
    """The transformer's layers; none where they cannot be told, and then all weights are gathered at once."""
    wanted = backbone.config.get_text_config().num_hidden_layers
    return next((m for m in backbone.modules() if isinstance(m, nn.ModuleList) and len(m) == wanted), nn.ModuleList())


def num_passes(accelerator: Accelerator, own: int) -> int:
    """The most passes that any process needs: collective."""
    return int(accelerator.gather(torch.tensor([own], device=accelerator.device)).max())


def score_together(
    network: RewardNetwork, sequences: Sequence[Sequence[int]], max_tokens: int, accelerator: Accelerator
) -> np.ndarray:
    """What ``project_all`` gives of this process' sequences, fp32 [N, 1 + K]: collective."""
    batches = split_by_tokens(
        range(len(sequences)),
        cost=lambda batch: network.batch_tokens([sequences[index] for index in batch]),
        size=lambda index: len(sequences[index]),
        prompt=lambda index: tuple(sequences[index][:16]),
        max_tokens=max_tokens,
    )
    width = 1 + network.num_heads if network.num_heads > 1 else 1
    found = np.zeros((len(sequences), width), dtype=np.float32)
    with torch.no_grad():
        for number in range(num_passes(accelerator, len(batches))):
            batch = batches[number] if number < len(batches) else []
            values = network([sequences[index] for index in batch] or [[0]], all_heads=True).float().cpu().numpy()
            if batch:
                found[batch] = values.reshape(len(batch), width)
    return found


# ------------------------------------------------------------------ states: whole on the disk, divided in memory


def whole(value: Any) -> Any:
    """A tensor with all its parts (collective where it is divided); anything else as it is."""
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def placed_like(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """A whole tensor divided as the parameter is (collective), or as it is where that is whole."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), mesh, parameter.placements)


def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``state_dict`` with whole tensors: collective where they are divided."""
    state = optimizer.state_dict()
    return {
        **state,
        "state": {index: {k: whole(v) for k, v in values.items()} for index, values in state["state"].items()},
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put a whole ``state_dict`` back into an optimizer whose parameters may be divided."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    placed = {
        index: {
            # a step counter has no shape and is never divided
            name: placed_like(value, parameters[index]) if value.shape == parameters[index].shape else value
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": placed})
