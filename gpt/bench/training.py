"""Training steps that are compared: ours with one switch changed at a time, and nanoGPT's.

All begin with the same weights and see the same tokens, and what they lose on the first batch is
compared: nobody is fast by computing something else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.loss import total_nats
from gpt.model import GPT
from gpt.native import gradients
from gpt.shares import in_shares, share_tokens
from gpt.training.optim import OptimizerConfig, make_optimizer
from gpt.weights.layout import gpt2_layout

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}
CLIP = 1.0


@dataclass(frozen=True)
class Shape:
    """What is trained on what.

    Attributes:
        layers, heads, width, block, vocabulary: of the model.
        batch: blocks in a step.
    """

    layers: int
    heads: int
    width: int
    block: int
    vocabulary: int
    batch: int

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.block

    @property
    def config(self) -> GPTConfig:
        """nanoGPT's architecture, without biases as its own recipes have it."""
        return GPTConfig(
            vocab_size=self.vocabulary, block_size=self.block, n_layer=self.layers,
            n_head=self.heads, d_model=self.width, position="learned", norm="layernorm",
            mlp="gelu-exact", bias=False, qk_norm=False, tie_embeddings=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A row of the table.

    Attributes:
        name: what is different about it.
        precision: of the products.
        step: takes one training step.
        loss: of the first batch, with the weights that all begin with.
        switch: of ours, what is switched other than training has it; empty: nothing.
        on: whether the switch is on in this row.
    """

    name: str
    precision: str
    step: Callable[[], None]
    loss: Callable[[], float]
    switch: str = ""
    on: bool = False


class Ours:
    """A model of ours, and its training step under any switches.

    Args:
        weights: nanoGPT's, or None for new ones.
    """

    def __init__(self, shape: Shape, ids: Tensor, weights: dict[str, Tensor] | None) -> None:
        self.shape = shape
        self.inputs, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        gradients.get_ready()  # as the trainer does
        self.model = GPT(shape.config)
        if weights is not None:
            layout = gpt2_layout(shape.config, transposed=False)
            state = {
                name: torch.cat([weights[part.name] for part in parts])
                for name, parts in layout.items()
            }
            state["head.weight"] = state["embed.weight"]
            self.model.load_state_dict(state)
        self._optimizers: dict[bool, torch.optim.Optimizer] = {}
        self._compiled: Any = None

    def subjects(self, precision: str, *, switches: bool, compiled: bool) -> Iterator[Subject]:
        """The rows of one precision; the first is what training does."""
        shares = in_shares(self.shape.tokens, self.shape.vocabulary, "cpu")
        yield self._subject("antiphon", precision)
        if switches:
            yield self._subject("  AdamW not fused", precision, fused=False, switch="fused AdamW")
            other = "whole" if shares else "in shares"
            yield self._subject(
                f"  loss {other}", precision, shares=not shares, switch="loss in shares"
            )
        if compiled:
            yield self._subject("  compiled", precision, compiled=True, switch="compile")

    def _subject(
        self,
        name: str,
        precision: str,
        *,
        fused: bool = True,
        shares: bool | None = None,
        compiled: bool = False,
        switch: str = "",
    ) -> Subject:
        optimizer = self._optimizer(fused)
        model: Any = self.model
        if compiled:
            if self._compiled is None:  # its truth would be its length, which it lacks
                self._compiled = torch.compile(self.model, dynamic=False)
            model = self._compiled

        def nats() -> Tensor:
            if shares is None:
                found: Tensor = model(self.inputs, targets=self.targets)
                return found
            x = self.model.hidden(self.inputs).flatten(0, 1)
            if shares:
                share = share_tokens(self.shape.vocabulary, "cpu")
                return total_nats(x, self.model.head.weight, self.targets.flatten(), share=share)
            logits = self.model.logits(x).float()
            return F.cross_entropy(logits, self.targets.flatten(), reduction="sum")

        def loss() -> Tensor:
            with autocast(precision):
                return nats() / self.shape.tokens

        return Subject(
            name, precision, lambda: take_step(loss(), self.model, optimizer), first_loss(loss),
            switch, on=compiled or bool(shares),
        )  # fmt: skip

    def _optimizer(self, fused: bool) -> torch.optim.Optimizer:
        if fused not in self._optimizers:
            named = self.model.named_parameters()
            self._optimizers[fused] = make_optimizer(
                named, OptimizerConfig(), self.shape.config, fused=fused
            )
        return self._optimizers[fused]


class NanoGPT:
    """nanoGPT's own model, optimizer and loss, from its `model.py`."""

    def __init__(self, path: Path, shape: Shape, ids: Tensor) -> None:
        self.inputs, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        module = load(path)
        with contextlib.redirect_stdout(io.StringIO()):
            self.model = module.GPT(
                module.GPTConfig(
                    block_size=shape.block, vocab_size=shape.vocabulary, n_layer=shape.layers,
                    n_head=shape.heads, n_embd=shape.width, dropout=0.0, bias=False,
                )
            )  # fmt: skip
            self._optimizer = self.model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
        self._compiled: Any = None

    def subjects(self, precision: str, *, compiled: bool) -> Iterator[Subject]:
        yield self._subject("nanogpt", precision, self.model)
        if compiled:
            if self._compiled is None:
                self._compiled = torch.compile(self.model)
            yield self._subject("nanogpt compiled", precision, self._compiled)

    def _subject(self, name: str, precision: str, model: Any) -> Subject:
        def loss() -> Tensor:
            with autocast(precision):
                found: Tensor = model(self.inputs, self.targets)[1]
            return found

        return Subject(
            name,
            precision,
            lambda: take_step(loss(), self.model, self._optimizer),
            first_loss(loss),
        )


def load(path: Path) -> Any:
    """nanoGPT's module.

    Raises:
        ConfigError: there is no such file, or no GPT in it.
    """
    file = path / "model.py" if path.is_dir() else path
    said = f"--nanogpt is {str(path)!r}, but"
    if not file.is_file():
        raise ConfigError(f"{said} there is no model.py; give nanoGPT's folder or its model.py")
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{said} that is no Python file; give nanoGPT's model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{said} it cannot be imported ({error}); give nanoGPT's") from None
    if not (hasattr(module, "GPT") and hasattr(module, "GPTConfig")):
        raise ConfigError(f"{said} it has no GPT and GPTConfig; give nanoGPT's model.py")
    return module


def autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def first_loss(loss: Callable[[], Tensor]) -> Callable[[], float]:
    def found() -> float:
        with torch.no_grad():
            return float(loss())

    return found


def take_step(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Backward, clip, update: what both programs' loops do."""
    loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
