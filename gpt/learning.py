"""Byte-pair encoding learned from text, by `rustbpe`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import rustbpe

from gpt.codec import unless_panic
from gpt.errors import TokenizerError
from gpt.specials import SpecialFinder
from gpt.splitting import Splitter, split_pattern, utf8

MIN_BPE_VOCAB = 257
"""256 bytes and end-of-text."""


def learn(
    texts: Iterable[str], vocab_size: int, pattern: str, special_tokens: Sequence[str]
) -> tuple[list[bytes], str]:
    """The tokens in order of their ids, and the pattern as a regular expression.

    Args:
        texts, vocab_size, pattern, special_tokens: as for `gpt.tokenizer.Tokenizer.bpe`.

    Raises:
        TokenizerError: vocab_size too small, an unusable pattern, or broken text.
    """
    least = MIN_BPE_VOCAB + len(special_tokens)
    if vocab_size < least:
        named = f", {len(special_tokens)} special tokens" if special_tokens else ""
        raise TokenizerError(
            f"vocab_size is {vocab_size}, but a bpe vocabulary needs at least {least} "
            f"(256 bytes{named} and end-of-text); give more, or use --tokenizer chars"
        )
    pattern = split_pattern(pattern)
    splitter = Splitter(pattern)
    learner = rustbpe.Tokenizer()
    if special_tokens:
        texts = _ordinary(texts, SpecialFinder(special_tokens))
    # rustbpe collects buffer_size texts before it counts them; ours are large.
    segments = (segment for text in texts for segment in _checked(splitter.segments([text])))
    size = vocab_size - 1 - len(special_tokens)
    try:
        learner.train_from_iterator(segments, size, buffer_size=16, pattern=pattern)
    except BaseException as error:  # noqa: BLE001 (Rust panics are no Exceptions)
        raise unless_panic(error, "no vocabulary can be learned from this text") from None
    ranks = sorted(learner.get_mergeable_ranks(), key=lambda pair: pair[1])
    return [bytes(token) for token, _ in ranks], pattern


def _checked(segments: Iterable[str]) -> Iterator[str]:
    offset = 0
    for segment in segments:
        utf8(segment, offset)
        offset += len(segment)
        yield segment


def _ordinary(texts: Iterable[str], finder: SpecialFinder) -> Iterator[str]:
    """The texts without the special tokens in them, a stretch at a time."""
    for text in texts:
        for named, parts in finder.stretches([text]):
            if not named:
                yield "".join(parts)
