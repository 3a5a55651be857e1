"""Sharded training: parameters, gradients and optimizer state spread over the processes (FSDP2).

`--trainer.strategy fsdp2`. Each block gathers its weights when it runs and lets go of them again
(Zhao et al., "PyTorch FSDP", arXiv 2304.11277; per-parameter sharding as in torchtitan, arXiv
2410.06511). A checkpoint is one file with whole tensors, the same as without sharding: any number
of processes can go on with it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry

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

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(NAME, cls, description="FSDP2: everything sharded")


if NAME not in StrategyRegistry:
    FSDP2Strategy.register_strategies(StrategyRegistry)


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
