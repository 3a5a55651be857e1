"""TextDataModule: any text, prepared once, as training and evaluation batches."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from gpt.data.prepare import prepare
from gpt.data.shards import PreparedData
from gpt.errors import ConfigError
from gpt.tokenizer import Tokenizer
from gpt.training.blocks import EvalBlocks, TrainBlocks


class TextDataModule(L.LightningDataModule):
    """Text from a named corpus or from files, tokenized into shards that later runs reuse.

    Args:
        source: a named corpus (`shakespeare`, `sotu`, `tinyshakespeare`), or files, folders, globs.
        tokenizer: `bpe` learns a vocabulary from the training text; `bytes`; `chars`.
        vocab_size: tokens that `bpe` learns, end-of-text included.
        batch_size: blocks per step, process and accumulated part.
        eval_batch_size: blocks per forward in evaluation; it does not change the result.
        val_fraction: share of the text that is held out for evaluation.
        root: folder for downloaded and tokenized text.
        document_borders: let no token see past the border of its document, and count positions
            from there; otherwise a block is one text, whatever end-of-text stands in it.
        block_size: tokens per block; the trainer takes the model's.
        seed: of the order of training blocks; the trainer takes the run's.
    """

    def __init__(
        self,
        source: str | list[str] = "shakespeare",
        tokenizer: str = "bpe",
        vocab_size: int = 2048,
        batch_size: int = 32,
        eval_batch_size: int = 32,
        val_fraction: float = 0.1,
        root: str = "data",
        document_borders: bool = False,
        block_size: int = 256,
        seed: int = 1337,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if value < 1:
                raise ConfigError(f"data.{name} is {value}, but must be at least 1")
        self.source = source
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.document_borders = document_borders
        self.block_size = block_size
        self.seed = seed
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._val_fraction = val_fraction
        self._root = Path(root)
        self._prepared: PreparedData | None = None

    def _prepare(self, *, progress: bool) -> PreparedData:
        return prepare(
            self.source,
            tokenizer=self._tokenizer,
            vocab_size=self._vocab_size,
            root=self._root,
            val_fraction=self._val_fraction,
            progress=progress,
        )

    def prepare_data(self) -> None:
        """Fetch and tokenize, in one process; text that is prepared already costs nothing."""
        self._prepare(progress=True)

    def setup(self, stage: str) -> None:
        """Open what `prepare_data` left, in every process."""
        if self._prepared is None:
            self._prepared = self._prepare(progress=False)

    @property
    def prepared(self) -> PreparedData:
        if self._prepared is None:
            raise RuntimeError("the data is there after prepare_data() and setup()")
        return self._prepared

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prepared.tokenizer

    @property
    def source_name(self) -> str:
        return self.source if isinstance(self.source, str) else ", ".join(self.source)

    def train_dataloader(self) -> TrainBlocks:
        return TrainBlocks(
            self.prepared.train,
            block_size=self.block_size,
            batch_size=self.batch_size,
            seed=self.seed,
            rank=self._rank,
            world_size=self._world_size,
        )

    def val_dataloader(self) -> EvalBlocks:
        return EvalBlocks(
            self.prepared.val,
            eot=self.tokenizer.eot,
            block_size=self.block_size,
            batch_size=self.eval_batch_size,
            rank=self._rank,
            world_size=self._world_size,
        )

    def test_dataloader(self) -> EvalBlocks:
        """The same held-out text: there is one, and it is evaluated whole."""
        return self.val_dataloader()

    @property
    def _rank(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def _world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size
