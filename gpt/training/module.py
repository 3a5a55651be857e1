"""GPTModule: a GPT with its loss, optimizer and evaluation, as Lightning wants them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.checkpoint import PAYLOAD_KEY, checkpoint_payload
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError, TokenizerError
from gpt.model import GPT
from gpt.tokenizer import Tokenizer
from gpt.training.blocks import IGNORE, Batch
from gpt.training.data import TextDataModule
from gpt.training.optim import OptimizerConfig, learning_rate, make_adamw


@dataclass(frozen=True)
class Evaluation:
    """One pass over held-out text.

    Attributes:
        nats: negative log-likelihood of all targets together.
        targets: tokens predicted.
        text_bytes: bytes of the text they stand for; None if only part of it was evaluated.
    """

    nats: float
    targets: int
    text_bytes: int | None

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / max(1, self.targets)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers, unlike the loss per token."""
        return None if self.text_bytes is None else self.nats / math.log(2) / self.text_bytes


class GPTModule(L.LightningModule):
    """Trains `self.gpt`, whose vocabulary comes from the data module's tokenizer.

    Args:
        preset: a named size whose values are the defaults of `config` on the command line. It is
            read there; here `config` counts.
        config: the architecture.
        optimizer: AdamW and its schedule.
        compile: run the model through torch.compile, in place: the checkpoint is the same.
    """

    gpt: GPT

    def __init__(
        self,
        config: GPTConfig,
        optimizer: OptimizerConfig,
        preset: str | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.preset = preset
        self.config = config
        self.optimizer_config = optimizer
        self.compile_model = compile
        self.run_name: str | None = None
        self.evaluation: Evaluation | None = None
        self._micro_losses: list[Tensor] = []  # of the accumulated parts of one optimizer step
        self._nats, self._targets = 0.0, 0
        self._rng: dict[str, Any] | None = None

    # --- Building -------------------------------------------------------------------------------

    @property
    def data(self) -> TextDataModule:
        data: TextDataModule = self.trainer.datamodule  # type: ignore[attr-defined]
        return data

    @property
    def tokenizer(self) -> Tokenizer:
        return self.data.tokenizer

    def setup(self, stage: str) -> None:
        """Raises ConfigError for a run without an end."""
        if stage == "fit" and self.trainer.max_steps < 1:
            raise ConfigError(
                f"trainer.max_steps is {self.trainer.max_steps}, but the learning-rate schedule "
                "needs the length of the run; set trainer.max_steps to 1 or more"
            )

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
        if self.compile_model:
            # Fixed shapes: training, evaluation and its last batch are all there is.
            self.gpt.compile(dynamic=False)

    # --- Training -------------------------------------------------------------------------------

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) → logits (B, T, V)."""
        logits: Tensor = self.gpt(ids)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        ids, targets = batch
        logits = self(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)
        # Every part has the same number of targets, so the step's loss is the mean of its parts'.
        self._micro_losses.append(loss.detach())
        whole = torch.stack(self._micro_losses).mean()
        self.log("train/loss", whole, batch_size=len(ids))
        self.log("lr", self.current_lr, batch_size=len(ids))
        return loss

    @property
    def current_lr(self) -> float:
        return learning_rate(self.global_step, self.trainer.max_steps, self.optimizer_config)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A scaler must take its factor out of the gradients before they are clipped, which fused
        # AdamW would do again.
        fused = not self._scales_gradients
        return make_adamw(self.named_parameters(), self.optimizer_config, fused=fused)

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
        if not gradient_clip_val:
            return
        if self._scales_gradients:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_algorithm == "value":
            nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
        else:
            nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._micro_losses.clear()
        for group in optimizer.param_groups:
            group["lr"] = self.current_lr

    def on_train_start(self) -> None:
        """After a resume: the flags given now win over what the optimizer's state remembers, and
        the random numbers of dropout go on where they stopped."""
        config = self.optimizer_config
        for group in self.trainer.optimizers[0].param_groups:
            group["betas"] = config.betas
            if group["weight_decay"]:
                group["weight_decay"] = config.weight_decay
        if self._rng is not None:
            torch.set_rng_state(self._rng["cpu"])
            if "cuda" in self._rng and torch.cuda.is_available():
                torch.cuda.set_rng_state(self._rng["cuda"])
            self._rng = None

    # --- Evaluation -----------------------------------------------------------------------------

    def _evaluate(self, batch: Batch) -> None:
        ids, targets = batch
        logits = self(ids)
        nats = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="none"
        )
        # On the host and in float64 from here on: a million small numbers are added up.
        self._nats += float(nats.cpu().double().sum())
        self._targets += int((targets != IGNORE).sum())

    def _finish_evaluation(self, prefix: str) -> None:
        if self.trainer.world_size > 1:
            sums = torch.tensor([self._nats, self._targets], dtype=torch.float64)
            sums = self.trainer.strategy.reduce(sums.to(self.device), reduce_op="sum").cpu()
            self._nats, self._targets = float(sums[0]), int(sums[1])
        prepared = self.data.prepared
        whole = self._targets == len(prepared.val)
        self.evaluation = Evaluation(
            self._nats, self._targets, prepared.val_bytes if whole else None
        )
        self._nats, self._targets = 0.0, 0
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
        checkpoint[PAYLOAD_KEY] = checkpoint_payload(
            self.config, self.tokenizer, name=self.run_name
        )
        rng: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state()
        checkpoint["rng"] = rng

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
        self._rng = checkpoint.get("rng")


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
