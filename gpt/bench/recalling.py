"""Associative recall: the texts, the recurrent models, training and testing.

The task is a plain form of that of Arora et al., "Zoology: measuring and improving recall in
efficient language models" (arXiv 2312.04927). A text with n pairs is

    p1 p2 … pn   f f f … f   k3 v3 k1 v1 …
    └ pairs ─┘  └ filler ┘   └ all keys, in random order, and the answers

where a token p says a key and its value at once, so that one look back is enough: how far it may
be is the question here, not how many steps of thought it takes. (With key and value in tokens of
their own a model must first learn to join neighbours, which takes thousands of steps.)

The first key of a tested question stands exactly `distance` tokens behind its pair. In training
the question begins at one of n places around there, drawn apart from the order of its keys: where
it begins then tells nothing of what comes first, and the answer must be found by the key, not by
counting back. Training learns from all n answers. Keys of a text differ, its values may repeat, so
no answer can be had by elimination. Whether the gradient of the loss reaches so far back is what
decides if a recurrent network can learn it (Bengio et al., "Learning long-term dependencies with
gradient descent is difficult", 1994).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt.config import GPTConfig
from gpt.model import GPT

KEYS, VALUES, FILLERS = 8, 8, 8
FIRST_VALUE = KEYS
FIRST_PAIR = KEYS + VALUES
FIRST_FILLER = FIRST_PAIR + KEYS * VALUES
VOCABULARY = FIRST_FILLER + FILLERS
WARM_UP_STEPS = 20
BATCH_TOKENS = 2048
"""Of a step, about: short texts come in larger batches."""
BATCHES = (4, 64)
TEST_TEXTS = 128
INIT_STD = 0.1


class Model(Protocol):
    embed: nn.Embedding

    def __call__(self, ids: Tensor) -> Tensor: ...

    def parameters(self) -> Any: ...


@dataclass(frozen=True)
class Texts:
    """A batch.

    Attributes:
        ids: (B, T) int64.
        pair: (B,) where the pair that is asked for first stands.
        asked: (B, n) where the keys of the question stand, the first of them first.
        answers: (B, n) the values that belong behind them.
    """

    ids: Tensor
    pair: Tensor
    asked: Tensor
    answers: Tensor


def make_texts(
    batch: int, distance: int, pairs: int, rng: torch.Generator, *, exact: bool
) -> Texts:
    """Texts in which the first answer lies `distance` (at least `pairs`) tokens back.

    Args:
        exact: else, on the average.
    """
    keys = torch.rand(batch, KEYS, generator=rng).argsort(-1)[:, :pairs]  # (B, n)
    values = torch.randint(VALUES, (batch, pairs), generator=rng)
    order = torch.rand(batch, pairs, generator=rng).argsort(-1)
    length = text_length(distance, pairs)
    ids = torch.randint(FIRST_FILLER, VOCABULARY, (batch, length), generator=rng)
    ids[:, :pairs] = FIRST_PAIR + keys * VALUES + values
    pair = order[:, 0]
    begins = pair if exact else torch.randint(pairs, (batch,), generator=rng)
    asked = (begins + distance)[:, None] + 2 * torch.arange(pairs)
    answers = FIRST_VALUE + values.gather(1, order)
    ids.scatter_(1, asked, keys.gather(1, order))
    ids.scatter_(1, asked + 1, answers)
    return Texts(ids, pair, asked, answers)


def text_length(distance: int, pairs: int) -> int:
    """Tokens of a text."""
    return distance + 3 * pairs


class Recurrent(nn.Module):
    """Embedding, layers of nn.LSTM or nn.RNN, head."""

    def __init__(self, kind: type[nn.LSTM | nn.RNN], width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.net = kind(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)
        if kind is nn.LSTM:
            # Forget gates that begin open: what an LSTM needs to remember for long at all
            # (Jozefowicz et al., "An empirical exploration of recurrent network architectures",
            # 2015). torch keeps the gates in the order input, forget, cell, output.
            with torch.no_grad():
                for layer in range(layers):
                    bias: Tensor = getattr(self.net, f"bias_ih_l{layer}")
                    bias[width : 2 * width] = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        # Every module's call returns Any.
        return self.head(self.net(self.embed(ids))[0])  # type: ignore[no-any-return]


def make_gpt(position: str, pattern: str, longest: int, width: int, heads: int, layers: int) -> GPT:
    """Raises ConfigError."""
    return GPT(
        GPTConfig(
            vocab_size=VOCABULARY,
            block_size=longest,
            n_layer=layers,
            n_head=heads,
            d_model=width,
            position=position,  # type: ignore[arg-type]  # GPTConfig checks it
            pattern=pattern,
            init_std=INIT_STD,
        )
    )


def count(model: Model) -> int:
    return sum(p.numel() for p in model.parameters())


def make_recurrent(kind: type[nn.LSTM | nn.RNN], layers: int, parameters: int) -> Recurrent:
    """The one whose number of parameters is nearest to `parameters`."""

    def size(width: int) -> int:
        with torch.device("meta"):
            return count(Recurrent(kind, width, layers))

    low, high = 1, 2
    while size(high) < parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) < parameters else (low, middle)
    return Recurrent(
        kind, min((low, high), key=lambda width: abs(size(width) - parameters)), layers
    )


def losses(model: Model, texts: Texts) -> Tensor:
    """(B, n) nats of each answer."""
    logits = model(texts.ids)  # (B, T, V)
    index = texts.asked[..., None].expand(-1, -1, logits.shape[-1])
    found = logits.gather(1, index).transpose(1, 2)  # (B, V, n)
    return F.cross_entropy(found.float(), texts.answers, reduction="none")


def train(
    model: Model,
    distances: Sequence[int],
    pairs: int,
    steps: int,
    rate: float,
    seed: int,
    say: Callable[[int, float, float], None],
) -> int:
    """Train on texts of all distances, each step on one of them, drawn from the seed.

    Args:
        say: is told step, loss and seconds now and then.

    Returns:
        How many steps were done; fewer after Ctrl-C.
    """
    rng = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.perf_counter()
    mean: float | None = None
    for step in range(steps):
        try:
            distance = distances[int(torch.randint(len(distances), (), generator=rng))]
            low, high = BATCHES
            batch = min(high, max(low, BATCH_TOKENS // text_length(distance, pairs)))
            loss = losses(model, make_texts(batch, distance, pairs, rng, exact=False)).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1, (step + 1) / WARM_UP_STEPS, 2 * (1 - step / steps))
            optimizer.step()
        except KeyboardInterrupt:
            return step
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 25 == 0 or step + 1 == steps:
            say(step + 1, mean, time.perf_counter() - began)
    return steps


@dataclass(frozen=True)
class Recall:
    """Of a model at one distance.

    Attributes:
        accuracy: share of texts whose first answer is the model's first choice.
        loss: nats of that answer, a mean.
        gradient: norm of its gradient with respect to the embedding of its pair, a mean over texts.
    """

    accuracy: float
    loss: float
    gradient: float


def test(model: Model, distance: int, pairs: int, seed: int) -> Recall:
    """Measured on texts that no training has drawn."""
    rng = torch.Generator().manual_seed(2**40 + seed)
    embedded: list[Tensor] = []

    def keep(module: nn.Module, given: object, out: Tensor) -> None:
        out.retain_grad()
        embedded.append(out)

    low, high = BATCHES
    batch = min(high, max(low, 4 * BATCH_TOKENS // text_length(distance, pairs)))
    right, nats, norms = 0.0, 0.0, 0.0
    handle = model.embed.register_forward_hook(keep)
    try:
        done = 0
        while done < TEST_TEXTS:
            texts = make_texts(min(batch, TEST_TEXTS - done), distance, pairs, rng, exact=True)
            logits = model(texts.ids)
            every = torch.arange(len(texts.ids))
            found = logits[every, texts.asked[:, 0]]
            loss = F.cross_entropy(found, texts.answers[:, 0], reduction="sum")
            (at,) = torch.autograd.grad(loss, embedded.pop())  # texts do not meet: (B, T, C)
            right += float((found.argmax(-1) == texts.answers[:, 0]).sum())
            nats += loss.item()
            norms += float(at[every, texts.pair].norm(dim=-1).sum())
            done += len(texts.ids)
    finally:
        handle.remove()
    return Recall(right / done, nats / done, norms / done)
