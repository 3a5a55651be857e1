"""GPTModule: a GPT with its loss, optimizer and evaluation, as Lightning wants them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from gpt.checkpoint import PAYLOAD_KEY, LoadedModel, checkpoint_payload
from gpt.config import GPTConfig
from gpt.data.batches import Batch
from gpt.errors import CheckpointError, ConfigError, TokenizerError
from gpt.evaluation import Evaluation, Tally
from gpt.flops import flops_per_token
from gpt.lora import NO_LORA, LoRAConfig, adapt
from gpt.model import GPT
from gpt.native import gradients
from gpt.patterns import trust
from gpt.plan import AttentionPlan
from gpt.tokenizer import Tokenizer
from gpt.training.base import check_block_size, check_same_adapters
from gpt.training.data import TextDataModule
from gpt.training.ema import use_trained_weights
from gpt.training.lean import with_signature_at_hand
from gpt.training.optim import (
    OptimizerConfig,
    decay_share,
    learning_rate,
    make_optimizer,
    parameter_groups,
    set_step,
)
from gpt.training.rng import rng_states, set_rng_state
from gpt.training.sharding import is_sharded, shard

_PLAIN = frozenset({"_current_fx_name", "step_loss", "gradient_norm"})
"""Attributes that are never parameters, buffers or submodules."""


class GPTModule(L.LightningModule):
    """Trains `self.gpt`, whose vocabulary comes from the data module's tokenizer.

    Args:
        preset: a named size whose values are the defaults of `config` on the command line. It is
            read there; here `config` counts.
        config: the architecture.
        optimizer: AdamW or Muon, its schedule, and the averaging of weights.
        init_from: begin with this model: a model folder, a run's folder or a .ckpt file, whose
            architecture and tokenizer are taken. The command line reads it; here `base` counts.
        lora: train small matrices beside the frozen ones (rank 1 or more), not the whole model.
        compile: run the model through torch.compile, in place: the checkpoint is the same.
        activation_checkpointing: keep only what enters each block and compute the rest again for
            the gradients: less memory, about a third more time, the same numbers.

    Attributes:
        step_loss: the loss of the step in hand, of this process's parts so far; still on the
            device, as reading it would wait for that.
        gradient_norm: of the last step, before clipping; None where it is not known, since under
            fp16 the gradients are scaled.
        base: the model to begin with; None: new weights, or those of a checkpoint.
        chat_template: that model's, which the trained one has, too.
        base_loss: that model's loss on the held-out text, once it is measured.
    """

    gpt: GPT

    def __init__(
        self,
        config: GPTConfig,
        optimizer: OptimizerConfig,
        preset: str | None = None,
        init_from: str | None = None,
        lora: LoRAConfig = NO_LORA,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.preset = preset
        self.config = config
        trust(config.patterns)  # the user's own settings may name the user's own classes
        self.optimizer_config = optimizer
        self.init_from = init_from
        self.lora = lora
        self.base: LoadedModel | None = None
        self.chat_template: str | None = None
        self.base_loss: float | None = None
        self.compile_model = compile
        self.activation_checkpointing = activation_checkpointing
        self.schedule: Callable[[int], float] = self._configured_rate
        """The learning rate of a step; the range test puts its own here."""
        self.run_name: str | None = None
        self.evaluation: Evaluation | None = None
        # Of the accumulated parts of one optimizer step:
        self._part_nats: list[Tensor] = []
        self._part_targets: list[int] = []
        self.step_loss: Tensor | None = None
        self._step_metrics: dict[str, float | Tensor] = {}
        self.gradient_norm: Tensor | None = None
        self._tally = Tally()
        self._rng: list[dict[str, Any]] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what changes at each step without a look at parameters, buffers and submodules.

        Lightning alone notes forty times a step which hook it is in.
        """
        if name in _PLAIN:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # --- Building -------------------------------------------------------------------------------

    @property
    def data(self) -> TextDataModule:
        data: TextDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    @property
    def tokenizer(self) -> Tokenizer:
        return self.data.tokenizer

    def setup(self, stage: str) -> None:
        """Raises ConfigError for a run without an end, and for what cannot go together."""
        check_block_size(self.data, self.config, begins_with_model=self.init_from is not None)
        if self.lora.on and is_sharded(self.trainer.strategy):
            raise ConfigError(
                f"model.lora.rank is {self.lora.rank}, but trainer.strategy fsdp2 shards what is "
                "trained, and frozen weights are not; use ddp, or train all with rank 0"
            )
        if stage == "fit" and self.trainer.max_steps < 1:
            raise ConfigError(
                f"trainer.max_steps is {self.trainer.max_steps}, but the learning-rate schedule "
                "needs the length of the run; set trainer.max_steps to 1 or more"
            )
        if stage == "fit" and self.trainer.strategy.root_device.type == "cpu":
            gradients.get_ready()

    def configure_model(self) -> None:
        """Build the model once the tokenizer is known. A second call changes nothing.

        Raises:
            ConfigError: a vocabulary too small for the tokenizer.
        """
        if hasattr(self, "gpt"):
            return
        n_vocab = self.tokenizer.n_vocab
        if self.config.vocab_size == 0:
            self.config = self.config.replace(vocab_size=n_vocab)
        if self.config.vocab_size < n_vocab:
            raise ConfigError(
                f"model.config.vocab_size is {self.config.vocab_size}, but the "
                f"{self.tokenizer.kind} tokenizer of {self.data.source_name} has {n_vocab} tokens; "
                f"set it to {n_vocab} or more, or to 0 to take it from the tokenizer"
            )
        self.gpt = GPT(self.config)
        if self.base is not None:
            self.gpt.load_state_dict(self.base.model.state_dict())
            self.chat_template = self.base.chat_template
            self.base = None  # so that its memory is free again
        if self.lora.on:
            adapt(self.gpt, self.lora)
        self.gpt.activation_checkpointing = self.activation_checkpointing
        if is_sharded(self.trainer.strategy):
            assert self.device_mesh is not None, "Lightning hands it over before this"
            shard(self.gpt, self.device_mesh)
        if self.compile_model:
            # Fixed shapes: training, evaluation and its last batch are all there is.
            self.gpt.compile(dynamic=False)

    @property
    def flops_per_token(self) -> float:
        """Of a training step. Frozen matrices take no gradients of their own."""
        flops = flops_per_token(self.config, self.data.block_size)
        return flops.adapting if self.lora.on else flops.training

    # --- Training -------------------------------------------------------------------------------

    def forward(self, ids: Tensor, targets: Tensor | None = None, *, each: bool = False) -> Tensor:
        """ids (B, T) → logits (B, T, V), or with targets their nats, as `GPT.forward`."""
        plan = None
        if self.data.document_borders:
            plan = AttentionPlan.packed(
                ids, eot=self.tokenizer.eot, pattern=self.gpt.pattern, one_group=self.compile_model
            )
        found: Tensor = self.gpt(ids, plan, targets=targets, each=each)
        return found

    @property
    def _part_size(self) -> int:
        """Most targets of one accumulated part: what its sum of nats is divided by."""
        return self.data.batch_size * self.data.block_size

    @with_signature_at_hand
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        ids, targets, counted = batch
        self._part_targets.append(counted)
        nats: Tensor = self(ids, targets)
        self._part_nats.append(nats.detach())
        last_part = (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
        logged = (self.global_step + 1) % max(1, self.trainer.log_every_n_steps) == 0  # type: ignore[attr-defined]
        self.step_loss = self._step_loss(of_all=last_part and logged)
        if last_part and logged:
            self.log_step({"train/loss": self.step_loss, "lr": self.current_lr})
        return nats / self._part_size

    def log_step(self, metrics: dict[str, float | Tensor]) -> None:
        """Hand numbers of the step in hand to callbacks at once, to the loggers when it ends.

        Lightning's `log` copies and moves a container for each number, which for the four of a step
        was half of what a logging step cost over a bare one.
        """
        self.trainer.callback_metrics.update(metrics)  # type: ignore[arg-type]
        self._step_metrics |= metrics

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._step_metrics:
            row = {name: float(value) for name, value in self._step_metrics.items()}
            self._step_metrics.clear()
            for logger in self.trainer.loggers:
                logger.log_metrics(row, self.global_step - 1)  # Lightning counts from 0

    def _step_loss(self, *, of_all: bool) -> Tensor:
        """The mean over all targets of the step so far: of this process, or of all of them."""
        first, *more = self._part_nats
        nats = torch.stack(self._part_nats).sum() if more else first
        targets = sum(self._part_targets)
        if of_all and self.trainer.world_size > 1:
            both = torch.stack([nats.double(), torch.full_like(nats, targets).double()])
            nats, targets = self.trainer.strategy.reduce(both, reduce_op="sum").tolist()
            return torch.tensor(nats / max(1, targets))
        return nats / max(1, targets)

    def _weigh_gradients(self) -> None:
        """Make the gradient that of the mean over all targets of the step, whatever the share of
        each part and process.

        Each part's loss is its nats over `_part_size`, and Lightning takes the mean over parts and
        processes. Where all parts are full that is the mean already and nothing is done.
        """
        parts, targets = len(self._part_targets), sum(self._part_targets)
        if self.trainer.world_size > 1:
            counts = torch.tensor([parts, targets], dtype=torch.int64, device=self.device)
            counts = self.trainer.strategy.reduce(counts, reduce_op="sum")
            parts, targets = counts.tolist()
        if targets not in (0, parts * self._part_size):
            factor = parts * self._part_size / targets
            torch._foreach_mul_([p.grad for p in self.parameters() if p.grad is not None], factor)

    @property
    def current_lr(self) -> float:
        return self.schedule(self.global_step)

    def _configured_rate(self, step: int) -> float:
        return learning_rate(step, self.trainer.max_steps, self.optimizer_config)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A scaler must take its factor out of the gradients before they are clipped, which fused
        # AdamW would do again.
        fused = not self._scales_gradients
        named = self.named_parameters()
        return make_optimizer(named, self.optimizer_config, self.config, fused=fused)

    @property
    def _scales_gradients(self) -> bool:
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip. Lightning refuses a fused optimizer under bf16 too, where nothing is scaled."""
        if self._scales_gradients:
            if gradient_clip_val:
                self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        trained = list(self.gpt.parameters())  # once: it walks all modules
        gradients = [p.grad for p in trained if p.grad is not None]
        self.gradient_norm = nn.utils.get_total_norm(gradients)
        if not gradient_clip_val:
            return
        if gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(trained, gradient_clip_val)
        else:
            nn.utils.clip_grads_with_norm_(trained, gradient_clip_val, self.gradient_norm)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._weigh_gradients()
        self._part_nats.clear()
        self._part_targets.clear()
        config = self.optimizer_config
        decay = decay_share(self.global_step, self.trainer.max_steps, config)
        set_step(optimizer, config, self.current_lr, decay)

    def on_train_start(self) -> None:
        """After a resume: the flags given now win over what the optimizer's state remembers, and
        the random numbers of dropout go on where they stopped."""
        groups = parameter_groups(self.named_parameters(), self.optimizer_config, self.config)
        for group, made in zip(self.trainer.optimizers[0].param_groups, groups, strict=True):
            group.update((name, value) for name, value in made.items() if name != "params")
        if self._rng is not None:
            rank = self.trainer.global_rank
            if rank < len(self._rng):  # a process more than there were keeps its own
                set_rng_state(self._rng[rank], self.device)
            self._rng = None

    # --- Evaluation -----------------------------------------------------------------------------

    def _evaluate(self, batch: Batch) -> None:
        ids, targets, _ = batch
        self._tally.add(self(ids, targets, each=True), targets)

    def _finish_evaluation(self, prefix: str) -> None:
        if self.trainer.world_size > 1:
            state = self._tally.state().to(self.device)
            self._tally.load(self.trainer.strategy.reduce(state, reduce_op="sum").cpu())
        tally, self._tally = self._tally, Tally()
        prepared = self.data.prepared
        whole = tally.targets == len(prepared.val)
        self.evaluation = Evaluation(
            tally.nats,
            tally.targets,
            prepared.val_bytes if whole else None,
            prepared.val_chars if whole else None,
        )
        self.log(f"{prefix}/loss", self.evaluation.loss)
        if self.evaluation.bits_per_byte is not None:
            self.log(f"{prefix}/bpb", self.evaluation.bits_per_byte)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self._finish_evaluation("val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch)

    def on_test_epoch_end(self) -> None:
        self._finish_evaluation("test")

    # --- Checkpoints ----------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what makes the checkpoint a model: architecture and tokenizer, as plain data."""
        lora = self.lora if self.lora.on else None
        payload = checkpoint_payload(
            self.config,
            self.tokenizer,
            name=self.run_name,
            lora=lora,
            chat_template=self.chat_template,
        )
        payload["training"] = {"data": self.data.record()}
        checkpoint[PAYLOAD_KEY] = payload
        checkpoint["rng"] = rng_states(self.device)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the checkpoint is of this architecture and this tokenizer.

        Raises:
            CheckpointError: another architecture; the fields that differ are named.
            TokenizerError: another tokenizer; both are named.
        """
        payload = checkpoint.get(PAYLOAD_KEY)
        if payload is None:
            raise CheckpointError(
                "the checkpoint holds no model description; it was not written by this trainer"
            )
        theirs, ours = Tokenizer.from_dict(payload["tokenizer"]), self.tokenizer
        if theirs.fingerprint != ours.fingerprint:
            raise TokenizerError(
                f"the checkpoint was trained with {_describe(theirs)}, but "
                f"{self.data.source_name} is prepared with {_describe(ours)}; give the data "
                "settings of the checkpoint's run (its config.yaml), or start a new run"
            )
        check_same_architecture(GPTConfig.from_dict(payload["model"]), self.config)
        check_same_adapters(LoRAConfig.from_dict(payload.get("lora", {})), self.lora)
        self.chat_template = payload.get("chat_template")
        if self.trainer.state.fn == "fit":
            self._rng = checkpoint.get("rng")
            use_trained_weights(checkpoint)


def check_same_architecture(saved: GPTConfig, wanted: GPTConfig) -> None:
    """Raises CheckpointError that names each field in which the two differ.

    Dropout is not part of the weights and may change from run to run.
    """
    differences = [
        f"{field.name} {getattr(saved, field.name)} (checkpoint) and "
        f"{getattr(wanted, field.name)} (asked for)"
        for field in dataclasses.fields(GPTConfig)
        if field.name not in ("dropout", "attn_dropout", "init_std")
        and getattr(saved, field.name) != getattr(wanted, field.name)
    ]
    if differences:
        raise CheckpointError(
            f"the checkpoint is of another architecture: {'; '.join(differences)}; give the "
            "config.yaml of the checkpoint's run, or start a new run"
        )


def _describe(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.kind} of {tokenizer.n_vocab} tokens ({tokenizer.fingerprint[:12]})"
