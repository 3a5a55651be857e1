"""How good a model is on a text: one number that does not depend on how it was computed.

The trainer's validation and test and the `antiphon eval` command all add up here, so that they
agree to the last digit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.loss import IGNORE

__all__ = ["IGNORE", "Evaluation", "Tally", "describe"]

_UNIT = 2.0**24
"""Nats are added up as whole numbers of 2**-24. Sums of whole numbers have no order: the result is
the same to the last bit however many batches and processes shared the work. It is rounded once a
block, by a ten-millionth of a nat at most, and holds 2**39 nats, about 10**11 tokens."""


@dataclass(frozen=True)
class Evaluation:
    """One pass over held-out text.

    Attributes:
        nats: negative log-likelihood of all targets together.
        targets: tokens predicted, the end-of-text after each document among them.
        text_bytes, text_chars: of the text that they stand for; None if only part of it was read.
    """

    nats: float
    targets: int
    text_bytes: int | None
    text_chars: int | None = None

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
        return None if not self.text_bytes else self.nats / math.log(2) / self.text_bytes

    @property
    def bits_per_char(self) -> float | None:
        """Comparable between tokenizers, and with results on texts of one byte a character."""
        return None if not self.text_chars else self.nats / math.log(2) / self.text_chars


def describe(found: Evaluation, *, text: str, checkpoint: object) -> str:
    """The lines that `test` and `antiphon eval` print.

    Args:
        text: which text it was.
        checkpoint: the path of the model.
    """
    size = "part of it" if found.text_bytes is None else f"{found.text_bytes:,} bytes"
    lines = [
        f"checkpoint     {checkpoint}",
        f"{text:<13}  {found.targets:,} tokens, {size}",
        f"loss           {found.loss:.6f} nats per token",
        f"perplexity     {found.perplexity:.4f}",
    ]
    if found.bits_per_byte is not None:
        lines.append(f"bits per byte  {found.bits_per_byte:.6f}")
    if found.bits_per_char is not None:
        lines.append(f"bits per char  {found.bits_per_char:.6f}")
    return "\n".join(lines)


class Tally:
    """Adds up the nats of batches.

    Attributes:
        nats: so far; NaN once any of them was not finite.
        targets: so far.
    """

    def __init__(self) -> None:
        self._units = 0
        self._broken = False
        self.targets = 0

    @property
    def nats(self) -> float:
        return math.nan if self._broken else self._units / _UNIT

    def add(self, nats: Tensor, targets: Tensor) -> None:
        """Count a batch.

        Args:
            nats: (B, T) of each target, as `GPT.forward` gives them.
            targets: (B, T) int64; IGNORE counts for nothing.
        """
        # On the host and in float64: a block's few hundred numbers are added exactly enough.
        rows = nats.view_as(targets).cpu().double().sum(-1)  # (B,)
        if bool(rows.isfinite().all()):
            self._units += int((rows * _UNIT).round().to(torch.int64).sum())
        else:
            self._broken = True
        self.targets += int((targets != IGNORE).sum())

    def state(self) -> Tensor:
        """(3,) int64 that may be added to those of other processes."""
        return torch.tensor([self._units, self.targets, int(self._broken)], dtype=torch.int64)

    def load(self, state: Tensor) -> None:
        """Take the sum of several states."""
        units, targets, broken = state.tolist()
        self._units, self.targets, self._broken = units, targets, broken > 0
