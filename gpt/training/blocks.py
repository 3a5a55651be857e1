"""Batches of blocks cut from a token stream: shuffled for training, in order for evaluation.

Both loaders are plain iterables with a length. A batch is a few slices of the memory-mapped stream,
tens of microseconds, so there are no workers to start, feed or lose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gpt.errors import DataError
from gpt.evaluation import IGNORE

ENDLESS = 2**40
"""Length of the training loader: the run's end is `max_steps`, never the loader's."""

Batch = tuple[Tensor, Tensor]
"""ids (B, T) int64 and targets (B, T) int64: the token after each id, or IGNORE."""


class Tokens(Protocol):
    """A stream of token ids; `gpt.data.shards.TokenArray` is one, a numpy array another."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> np.ndarray: ...


class TrainBlocks:
    """An endless sequence of full training batches, the same for the same seed.

    The stream is taken as a ring and cut into `len(tokens) // block_size` blocks, from an offset
    that each epoch draws anew: every token is a target at most once an epoch, and the borders
    between blocks wander. The blocks are then shuffled. Offset and order come from (seed, epoch)
    alone: where a run stands is one number, the blocks drawn so far, and that is all its state.

    A batch takes the next `batch_size` blocks even where one epoch ends and the next begins: every
    batch has the same number of targets, and no block is dropped, however small the corpus.

    Of several processes, each with its `rank`, all draw consecutive shares of one sequence: N of
    them see together what one sees with N times the batch size.

    Args:
        tokens: the stream, at least `block_size` long.
        block_size: T, targets per block.
        batch_size: B, blocks per batch and process.
        seed: of offsets and order, 0 to 2**64 - 1.

    Raises:
        DataError: fewer tokens than one block.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        block_size: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(tokens) < block_size:
            raise DataError(
                f"the training text has {len(tokens)} tokens, but one block needs {block_size}; "
                "give more text or a smaller model.config.block_size"
            )
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.blocks_per_epoch = len(tokens) // block_size
        self._drawn = 0  # blocks, by all processes together
        self._cuts: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Batch]:
        """Go on from where the state stands; a second iterator goes on where the first was left."""
        while True:
            first = self._drawn + self.rank * self.batch_size
            # Counted before the batch is handed out: a checkpoint is saved while it is in use.
            self._drawn += self.world_size * self.batch_size
            yield self.batch(first)

    def batch(self, first: int) -> Batch:
        """The blocks numbered `first` and up, counted from the beginning of the run."""
        T = self.block_size
        rows = np.empty((self.batch_size, T + 1), dtype=np.int64)
        n = len(self.tokens)
        for i in range(self.batch_size):
            epoch, place = divmod(first + i, self.blocks_per_epoch)
            start = int(self.cuts(epoch)[place])
            head = min(T + 1, n - start)
            rows[i, :head] = self.tokens[start : start + head]
            if head < T + 1:
                rows[i, head:] = self.tokens[0 : T + 1 - head]
        both = torch.from_numpy(rows)
        return both[:, :-1], both[:, 1:]

    def cuts(self, epoch: int) -> np.ndarray:
        """(blocks_per_epoch,) where each block of an epoch starts, in the order of training."""
        if epoch not in self._cuts:
            # Two integers make the key, so that neighbouring seeds and epochs share nothing.
            random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            offset = random.integers(len(self.tokens))
            order = random.permutation(self.blocks_per_epoch)
            self._cuts = {e: c for e, c in self._cuts.items() if e == epoch - 1}
            self._cuts[epoch] = (offset + order * self.block_size) % len(self.tokens)
        return self._cuts[epoch]

    def state_dict(self) -> dict[str, int]:
        return {"blocks_drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._drawn = int(state["blocks_drawn"])


class EvalBlocks:
    """A whole stream, in order, in blocks that do not overlap: each token is a target exactly once.

    The first token is predicted from end-of-text, the first of each later block from the token
    before it. The last block is filled up with targets that count for nothing.

    Of several processes each takes every `world_size`-th batch.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        eot: int,
        block_size: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(tokens) == 0:
            raise DataError(
                "the held-out text is empty; give more text or a larger data.val_fraction"
            )
        self.tokens = tokens
        self.eot = eot
        self.block_size = block_size
        self.batch_size = batch_size
        self._starts = range(0, len(tokens), block_size * batch_size)[rank::world_size]

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Batch]:
        T = self.block_size
        for start in self._starts:
            targets = self.tokens[start : start + T * self.batch_size]
            before = self.tokens[start - 1 : start] if start else np.array([self.eot])
            size = -(-len(targets) // T) * T
            ids = np.full(size, self.eot, dtype=np.int64)
            ids[0] = before[0]
            ids[1 : len(targets)] = targets[:-1]
            padded = np.full(size, IGNORE, dtype=np.int64)
            padded[: len(targets)] = targets
            yield torch.from_numpy(ids).view(-1, T), torch.from_numpy(padded).view(-1, T)
