"""Every member of the attention family learns: a few steps, a tiny model, a text that needs it.

The text: each line is written with four letters of its own out of 24, none twice in a row. Over all
lines every letter is as frequent as any other, and the letter before tells next to nothing (that it
will not come again: 0.04 nats). What helps is to look back at what the line has been written with,
so a model without attention stays near the entropy of the letters.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt.attention import Attention
from gpt.config import GPTConfig
from gpt.model import GPT

LETTERS, OF_A_LINE, LINE = 24, 4, 256
TOKENS = 512
"""Of a step: a row that is long enough for block rows, or several short ones."""


def write(rows: int, length: int, rng: torch.Generator) -> Tensor:
    """(rows, length) int64, lines one after another."""
    lines = -(-length // LINE)
    found = write_lines(rows * lines, rng).view(rows, lines * LINE)
    return found[:, :length]


def write_lines(lines: int, rng: torch.Generator) -> Tensor:
    letters = torch.rand(lines, LETTERS, generator=rng).argsort(-1)[:, :OF_A_LINE]
    # A step of 1 to 3 around the four: never the same again.
    steps = torch.randint(1, OF_A_LINE, (lines, LINE), generator=rng)
    return letters.gather(1, steps.cumsum(-1) % OF_A_LINE)


def held_out_gain(steps: int, length: int, **changes: Any) -> float:
    """Nats by which a trained model's loss on new lines lies below the entropy of the letters."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=LETTERS, block_size=length, n_layer=2, n_head=2, d_model=32, init_std=0.1
    )
    model = GPT(config.replace(**changes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    rng = torch.Generator().manual_seed(1)

    def loss(lines: int) -> Tensor:
        ids = write(lines, length + 1, rng)
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / steps)
        optimizer.zero_grad()
        loss(TOKENS // length).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        return math.log(LETTERS) - loss(8 * TOKENS // length).item()


@pytest.mark.parametrize(
    ("steps", "length", "changes"),
    [
        *(
            (100, 32, {"position": position})
            for position in ("none", "learned", "sinusoidal", "relative", "rotary", "alibi")
        ),
        *(
            (150, 512, {"pattern": pattern})
            for pattern in (
                "window:24",
                "window:24+sinks:4",
                "dilated:16:3",
                ["window:24", "causal"],
            )
        ),
        # These see much of other lines, too: there is more to tell apart.
        (200, 512, {"pattern": "fixed:32:4"}),
        (200, 512, {"pattern": "bigbird:48:4:1:0"}),
    ],
    ids=str,
)
def test_every_member_of_the_family_learns(
    steps: int, length: int, changes: dict[str, Any]
) -> None:
    assert held_out_gain(steps, length, **changes) >= 0.3


def test_the_text_cannot_be_learnt_without_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, "forward", lambda self, x, *others: torch.zeros_like(x))
    assert held_out_gain(100, 32) < 0.1
