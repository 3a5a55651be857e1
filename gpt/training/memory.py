"""Says before a run begins how much memory it will take, and warns where there is less."""

from __future__ import annotations

import sys

import lightning as L
from lightning.pytorch.callbacks import Callback

from gpt.amounts import size
from gpt.footprint import CPU_SLACK, GPU_SLACK, Training, footprint
from gpt.inspect import verdict
from gpt.lora import adapter_count
from gpt.machine import Memory, device_memory
from gpt.training.module import GPTModule
from gpt.training.sharding import is_sharded


class MemoryCheck(Callback):
    """Estimates a run's memory once its text is known, before the model is built.

    A warning, not a refusal: the estimate is an upper end for compiled models, and what other
    programs hold may be given back.

    Attributes:
        told: the estimate in a line, once it is made.
    """

    told: str | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or is_sharded(trainer.strategy):  # whose parts lie in several places
            return
        assert isinstance(pl_module, GPTModule)
        config = pl_module.config
        if not config.vocab_size:
            config = config.replace(vocab_size=pl_module.tokenizer.n_vocab)
        data = pl_module.data
        device = trainer.strategy.root_device
        training = Training(
            batch_size=data.batch_size,
            eval_batch_size=data.eval_batch_size,
            precision=str(trainer.precision),
            accumulate=trainer.accumulate_grad_batches,
            checkpointing=pl_module.activation_checkpointing,
            average=bool(pl_module.optimizer_config.ema_decay),
            block_size=data.block_size,
            adapters=adapter_count(config, pl_module.lora) if pl_module.lora.on else None,
            muon=pl_module.optimizer_config.kind == "muon",
            device=device.type,
        )
        memory = device_memory(device.type, device.index)
        slack = GPU_SLACK if device.type == "cuda" else CPU_SLACK
        if device.type != "cuda":
            # The processes of one machine share what it has.
            here = max(1, trainer.world_size // max(1, trainer.num_nodes))
            memory = Memory(memory.name, memory.free // here, memory.total)
        need = footprint(config, training, slack=slack).peak
        self.told = f"about {size(need)} besides what is loaded; {memory.name} has "
        self.told += f"{size(memory.free)} free"
        # The libraries are loaded by now.
        said = verdict(config, training, memory, slack=slack, base=0)
        if not said.startswith("fits") and trainer.is_global_zero:
            print(f"memory: {self.told}; the run {said}", file=sys.stderr)
