"""Logits of a token that depend on the tokens before it and on nothing else, to the last bit.

A matrix product rounds as its kernel adds up, and the kernel follows the shapes: whoever shares a
step, or how a text was cut into chunks, so shows in the last bits, and where two tokens are nearly
tied, in the text. Two things make the shapes stop mattering on CPU, both measured:

- rows. A product has other results for 1 row, for 2 or 3, and for 4 and more; with two threads also
  where a thread's share ends in such a remainder. So rows come in multiples of four a thread.
- keys. The fused kernel adds up in blocks of 512 keys from the first on, and its products over
  fewer keys add up in another order from some 200 keys on. So all positions from 0 on are read, up
  to the next border: multiples of 64 up to 192, of 512 beyond. What is read too much is hidden and
  adds exact zeros.

A token's keys, values and logits are then the same alone, in company, in a chunk, as a step of its
own, recomputed after a preemption, or found in a cache; nothing has to be replayed. That is a
property of kernels and not of torch's promises, so `prove` tries it out before it is relied upon.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.cache import PAGE_SIZE, KVCache
from gpt.errors import ServerError
from gpt.model import GPT
from gpt.pages import pages_for
from gpt.plan import AttentionPlan, Chunk

ROWS = 4
"""Rows from which on, and in multiples of which, a thread's product adds up alike."""

PROVEN_TOKENS = 560
"""Length of the text that is tried: past all borders of the keys that differ."""


class _PaddedLinear(nn.Linear):
    """A linear layer over (N, C) whose product has a multiple of `ROWS` rows for each thread."""

    def forward(self, x: Tensor) -> Tensor:
        short = -x.shape[0] % (ROWS * torch.get_num_threads())
        if not short:
            return super().forward(x)
        return super().forward(F.pad(x, (0, 0, 0, short)))[: x.shape[0]]


def make_deterministic(model: GPT) -> None:
    """Have the model's products round alike whatever the number of tokens; `gpt.plan` does the rest
    if asked for plans that are `fixed`.

    Raises:
        ServerError: it does not hold for this model on this machine.
    """
    if model.device.type != "cpu":
        raise ServerError(
            f"--deterministic holds on the CPU only, not on {model.device.type}; leave it out"
        )
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _PaddedLinear
    prove(model)


@torch.inference_mode()
def prove(model: GPT) -> None:
    """Run a text as one does that is alone, then in pieces and in company; compare all bits.

    Raises:
        ServerError: they differ.
    """
    length = min(PROVEN_TOKENS, model.config.block_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (length,), generator=generator)
    n_pages = pages_for(length, PAGE_SIZE)
    caches = [KVCache(model.config, 2 * n_pages + 1, dtype=model.dtype) for _ in range(2)]
    groups = len(caches[0].spec.groups)
    mine = [list(range(1, n_pages + 1))] * groups
    # Company has pages of its own, not side by side.
    others = [list(range(2 * n_pages, n_pages, -1))] * groups

    def run(cache: KVCache, *pieces: tuple[int, int, list[list[int]]]) -> Tensor:
        chunks = [Chunk(start, end - start, tables) for start, end, tables in pieces]
        plan = AttentionPlan.paged(
            chunks,
            page_size=PAGE_SIZE,
            pattern=cache.spec.patterns,
            fixed=True,
            conv_width=cache.spec.conv_width,
        )
        tokens = torch.cat([ids[start:end] for start, end, _ in pieces])
        logits: Tensor = model(tokens, plan, cache)
        return logits[: pieces[0][1] - pieces[0][0]]

    whole = torch.cat(
        [run(caches[0], (i, min(i + 512, length), mine)) for i in range(0, length, 512)]
    )
    at, piece, company = 0, 0, 0
    sizes: Seq[int] = (1, 1, 2, 3, 5, 30, 1, 17, 64, 4, 70, 1, 1, 9)
    while at < length:
        end = min(at + sizes[piece % len(sizes)], length)
        pieces = [(at, end, mine)]
        if piece % 3 and company < length:
            pieces.append((company, min(company + 1 + piece % 7, length), others))
            company = pieces[-1][1]
        if not torch.equal(run(caches[1], *pieces), whole[at:end]):
            raise ServerError(
                "--deterministic does not hold for this model on this machine: the logits of "
                f"tokens {at} to {end - 1} of a text depend on how it is cut or on its company "
                f"({model.dtype}, {torch.get_num_threads()} threads); try float32 and other "
                "--threads, or leave it out"
            )
        at, piece = end, piece + 1
