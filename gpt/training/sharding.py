"""Sharded training: parameters, gradients and optimizer state spread over the processes (FSDP2).

`--trainer.strategy fsdp2`. Each block gathers its weights when it runs and lets go of them again
(Zhao et al., "PyTorch FSDP", arXiv 2304.11277; per-parameter sharding as in torchtitan, arXiv
2410.06511). A checkpoint is one file with whole tensors, the same as without sharding: any number
of processes can go on with it.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from gpt.model import GPT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "fsdp2"


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's strategy with all processes as one data-parallel group and whole checkpoints.

    Args:
        process_group_backend: null takes nccl for GPUs and gloo for CPUs.
        timeout: after which a collective operation that some process never joined fails.
    """

    strategy_name = NAME

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(
            data_parallel_size=1,  # known once the processes are
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Spread a whole checkpoint over the processes, whoever wrote it.

        Lightning's own takes the numbers of the optimizer's parameters for the order of the
        model's, which is true of its own sharded runs only.
        """
        path = Path(self.broadcast(checkpoint_path))
        checkpoint: dict[str, Any] = torch.load(
            path, map_location="cpu", weights_only=True, mmap=True
        )
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model = self.model
        assert model is not None
        set_model_state_dict(model, checkpoint.pop("state_dict"), options=options)
        states = checkpoint.get("optimizer_states", [])
        for optimizer, state in zip(self.optimizers, states, strict=False):  # none in evaluation
            named = with_names(state, model, optimizer)
            set_optimizer_state_dict(model, optimizer, optim_state_dict=named, options=options)
        return checkpoint

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(NAME, cls, description="FSDP2: everything sharded")


if NAME not in StrategyRegistry:
    FSDP2Strategy.register_strategies(StrategyRegistry)


def with_names(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's saved state by parameter names instead of numbers.

    A number stands for a place in the groups, as it does for `Optimizer.load_state_dict`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    name_of: dict[int, str] = {}
    groups = []
    for saved, ours in zip(state["param_groups"], optimizer.param_groups, strict=True):
        here = [names[id(parameter)] for parameter in ours["params"]]
        name_of |= dict(zip(saved["params"], here, strict=True))
        groups.append({**saved, "params": here})
    return {
        "state": {name_of[i]: kept for i, kept in state["state"].items()},
        "param_groups": groups,
    }


def is_sharded(strategy: object) -> bool:
    return isinstance(strategy, ModelParallelStrategy)


def shard(gpt: GPT, mesh: DeviceMesh) -> None:
    """Shard a model in place, block by block: what is gathered at a time is one block."""
    from torch.distributed.fsdp import fully_shard

    for tensor in [*gpt.parameters(), *gpt.buffers()]:
        # Sharding keeps each process's own numbers; they must begin as the same ones.
        dist.broadcast(tensor.data, 0)
    data_parallel = mesh["data_parallel"]
    for block in gpt.blocks:
        fully_shard(block, mesh=data_parallel)
    fully_shard(gpt, mesh=data_parallel)
