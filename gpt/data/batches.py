"""Batches of blocks cut from a token stream: shuffled for training, in order for evaluation.

Both loaders are plain iterables with a length. A batch is a few slices of the memory-mapped stream,
a tenth of a millisecond, so there are no worker processes to start, feed or lose.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gpt.errors import ConfigError, DataError
from gpt.evaluation import IGNORE

ENDLESS = 2**40
"""Length of the training loader: the run's end is `max_steps`, never the loader's."""

_MIX = 2**32
"""The stream of random numbers that orders a mix; those below belong to its sources."""


class Batch(NamedTuple):
    """B blocks of T tokens.

    Attributes:
        ids: (B, T) int64.
        targets: (B, T) int64, the token after each id, or IGNORE.
        counted: targets that are not IGNORE, known here without waiting for any device.
    """

    ids: Tensor
    targets: Tensor
    counted: int


class Tokens(Protocol):
    """A stream of token ids; `gpt.data.shards.TokenArray` is one, a numpy array another."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` of a stream, which come from one source with a weight of its own."""

    name: str
    start: int
    stop: int
    weight: float


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

    **Weights.** Where `spans` differ in weight, each is a ring of its own with its own epochs, so
    no block has text of two sources. An epoch of the mix draws `round(weight * blocks)` blocks of
    each, at least one, in an order that comes from (seed, epoch) as well: after n epochs a source
    of weight w has been seen n * w times, each block equally often but for one. Where all weights
    are equal, borders of sources are like those of documents, and nothing is different from one
    source.

    Args:
        tokens: the stream, at least `block_size` long.
        block_size: T, targets per block.
        batch_size: B, blocks per batch and process.
        seed: of offsets and order, 0 to 2**64 - 1.
        spans: the sources and their weights, in the order of the stream; those of weight 0 are
            left out.

    Raises:
        DataError: fewer tokens than one block, in all or in a source that is mixed in.
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
        spans: Sequence[Span] = (),
    ) -> None:
        weights = {span.weight for span in spans}
        mixed = [span for span in spans if span.weight > 0] if len(weights) > 1 else []
        parts = [(f"the training text of {s.name}", s.stop - s.start) for s in mixed]
        for what, size in parts or [("the training text", len(tokens))]:
            if size < block_size:
                raise DataError(
                    f"{what} has {size} tokens, but one block needs {block_size}; "
                    "give more text or a smaller model.config.block_size"
                )
        self.tokens = tokens
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._mixed = mixed
        self._starts = [span.start for span in mixed]
        self._shares = [
            max(round(span.weight * ((span.stop - span.start) // block_size)), 1) for span in mixed
        ]
        self.blocks_per_epoch = sum(self._shares) if mixed else len(tokens) // block_size
        self._drawn = 0  # blocks, by all processes together
        self._cuts: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Batch]:
        """Go on from where the state stands; a second iterator goes on where the first was left.

        While a batch is trained on, a thread cuts the next one, so that a slow disk is not waited
        for. What it has cut is in no state: a batch counts as drawn when it is handed out.
        """
        step = self.world_size * self.batch_size
        with ThreadPoolExecutor(1, thread_name_prefix="antiphon-blocks") as thread:
            next_first, ahead = -1, None
            while True:
                first = self._drawn + self.rank * self.batch_size
                if ahead is None or next_first != first:  # at the start; after a change of state
                    ahead = thread.submit(self.batch, first)
                batch = ahead.result()
                # Counted before the batch is handed out: a checkpoint is saved while it is in use.
                self._drawn += step
                next_first = first + step
                ahead = thread.submit(self.batch, next_first)
                yield batch

    def batch(self, first: int) -> Batch:
        """The blocks numbered `first` and up, counted from the beginning of the run."""
        T = self.block_size
        rows = np.empty((self.batch_size, T + 1), dtype=np.int64)
        for i in range(self.batch_size):
            epoch, place = divmod(first + i, self.blocks_per_epoch)
            start = int(self.cuts(epoch)[place])
            ring, stop = self._ring(start)
            head = min(T + 1, stop - start)
            rows[i, :head] = self.tokens[start : start + head]
            if head < T + 1:
                rows[i, head:] = self.tokens[ring : ring + T + 1 - head]
        both = torch.from_numpy(rows)
        return Batch(both[:, :-1], both[:, 1:], rows.shape[0] * T)

    def cuts(self, epoch: int) -> np.ndarray:
        """(blocks_per_epoch,) where each block of an epoch starts, in the order of training."""
        if epoch not in self._cuts:
            made = self._mix(epoch) if self._mixed else self._ring_cuts(0, len(self.tokens), epoch)
            self._cuts = {e: c for e, c in self._cuts.items() if e == epoch - 1}
            self._cuts[epoch] = made
        return self._cuts[epoch]

    def _ring(self, start: int) -> tuple[int, int]:
        """The first token and the end of the ring in which a block starts."""
        if not self._mixed:
            return 0, len(self.tokens)
        span = self._mixed[bisect.bisect_right(self._starts, start) - 1]
        return span.start, span.stop

    def _ring_cuts(self, start: int, stop: int, epoch: int, stream: int = 0) -> np.ndarray:
        """Where each block of one epoch of the ring `start` to `stop` starts, shuffled."""
        random = self._random(epoch, stream)
        offset = random.integers(stop - start)
        order = random.permutation((stop - start) // self.block_size)
        cuts: np.ndarray = start + (offset + order * self.block_size) % (stop - start)
        return cuts

    def _mix(self, epoch: int) -> np.ndarray:
        """The blocks of one epoch of all rings that are mixed, each going on where it was left."""
        found = []
        for i, (span, share) in enumerate(zip(self._mixed, self._shares, strict=True)):
            blocks = (span.stop - span.start) // self.block_size
            first, end = epoch * share, (epoch + 1) * share
            laps = [
                self._ring_cuts(span.start, span.stop, lap, stream=i + 1)
                for lap in range(first // blocks, -(-end // blocks))
            ]
            skipped = first // blocks * blocks
            found.append(np.concatenate(laps)[first - skipped : end - skipped])
        return self._random(epoch, stream=_MIX).permutation(np.concatenate(found))

    def _random(self, epoch: int, stream: int) -> np.random.Generator:
        # Two integers make the key, so that neighbouring seeds and epochs share nothing; the
        # streams of one epoch begin 2**192 numbers apart.
        key = np.array([self.seed, epoch], np.uint64)  # a list would go through floats
        return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, stream]))

    def state_dict(self) -> dict[str, int]:
        return {"blocks_drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._drawn = int(state["blocks_drawn"])


class EvalBlocks:
    """A whole stream, in order: each token is a target exactly once.

    The first token is predicted from `eot`, the first of each later block from the token before it.
    The last block is filled up with targets that count for nothing.

    Blocks do not overlap, unless there is a stride: then each begins `stride` tokens after the one
    before it and counts its last `stride` targets alone (the first block counts all), so that every
    token sees at least `block_size - stride` tokens. That takes `block_size / stride` times as long
    and gives a lower loss: the two are not to be compared.

    Of several processes each takes every `world_size`-th batch. All get as many: sharded ones run
    each forward together, and one that has no text left runs a block that counts for nothing.

    Args:
        tokens: the stream.
        eot: id of what comes before the first token of a document (`Tokenizer.start`).
        block_size: T, tokens a block.
        batch_size: blocks a batch; it does not change what is counted.
        stride: 1 to block_size; None: block_size.

    Raises:
        DataError: an empty stream.
        ConfigError: a stride out of range.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        eot: int,
        block_size: int,
        batch_size: int,
        stride: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(tokens) == 0:
            raise DataError(
                "the held-out text is empty; give more text or a larger data.val_fraction"
            )
        self.stride = block_size if stride is None else stride
        if not 1 <= self.stride <= block_size:
            raise ConfigError(
                f"the stride is {stride}, but must be 1 to the context of {block_size}"
            )
        self.tokens = tokens
        self.eot = eot
        self.block_size = block_size
        self.batch_size = batch_size
        blocks = 1 + max(0, -(-(len(tokens) - block_size) // self.stride))
        self._blocks = range(blocks)
        firsts = range(0, blocks, batch_size)
        self._firsts = firsts[rank::world_size]
        self._batches = -(-len(firsts) // world_size)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        T, n = self.block_size, len(self.tokens)
        for first in self._firsts:
            starts = np.array(self._blocks[first : first + self.batch_size]) * self.stride
            begin, end = int(starts[0]), int(starts[-1]) + T
            # What stands before the first target, the targets of all blocks, and filling.
            text = np.full(end - begin + 1, self.eot, dtype=np.int64)
            head = max(begin - 1, 0)
            found = self.tokens[head : min(end, n)]
            text[head - begin + 1 : head - begin + 1 + len(found)] = found
            rows = np.lib.stride_tricks.sliding_window_view(text, T + 1)[starts - begin]  # (B, T+1)
            place = np.arange(T)
            counts = starts[:, None] + place < n
            counts &= (place >= T - self.stride) | (starts[:, None] == 0)
            targets = np.where(counts, rows[:, 1:], IGNORE)
            ids = torch.from_numpy(rows[:, :-1].copy())
            yield Batch(ids, torch.from_numpy(targets), int(counts.sum()))
        if len(self._firsts) < self._batches:
            yield Batch(torch.full((1, T), self.eot), torch.full((1, T), IGNORE), 0)
