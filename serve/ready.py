"""Before the first caller: is what was loaded fit to serve, and is it warm?"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpt.errors import InexpressibleTextError, ServerError, TokenizerError
from gpt.params import SamplingParams
from gpt.starter import Starter
from serve.asked import Asked
from serve.faults import GenerationFailedError
from serve.scheduler import QueueFullError

if TYPE_CHECKING:
    from gpt.tokenizer import Tokenizer
    from serve.engine import Engine

log = logging.getLogger(__name__)

SAMPLE = "It rained; 日本 é."
CHECK_TOKENS = 2
WARM_TOKENS = 4


async def self_check(engine: Engine) -> None:
    """Take a text to ids and back, and make two tokens of a prompt.

    Raises:
        ServerError: what is wrong; a server that starts with it could answer nothing.
    """
    tokenizer, config = engine.tokenizer, engine.model.config
    if tokenizer.n_vocab > config.vocab_size:
        raise ServerError(
            f"the tokenizer has {tokenizer.n_vocab} tokens, the model knows {config.vocab_size}; "
            "they do not belong together"
        )
    check_round_trip(tokenizer)
    await _generate(engine, [[tokenizer.start] * min(8, config.block_size - 1)], CHECK_TOKENS)


def check_round_trip(tokenizer: Tokenizer) -> None:
    """Raises ServerError unless a text survives being cut into tokens."""
    for text in (SAMPLE, SAMPLE[:10], "".join(_plain_characters(tokenizer))):
        try:
            back = tokenizer.decode(tokenizer.encode(text))
        except InexpressibleTextError:  # a small vocabulary; the last text is made of its own
            continue
        except TokenizerError as error:
            raise ServerError(f"the tokenizer is damaged: {error}") from None
        # Some imported vocabularies compose characters, or take spaces away.
        if _bare(back) != _bare(text):
            raise ServerError(
                f"the tokenizer makes {back!r} of {text!r}; the model folder is damaged"
            )
        return


def _plain_characters(tokenizer: Tokenizer) -> list[str]:
    """Letters and digits that are tokens."""
    words = (piece.decode("utf-8", "ignore") for piece in list(tokenizer.plain_tokens)[:1000])
    return [word for word in words if len(word) == 1 and word.isalnum()][:20]


def _bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


async def warm_up(engine: Engine, texts: int) -> None:
    """Run steps as large as they come, so that no caller pays for their first time: the longest
    prompt, then as many texts at once as may run.

    Raises:
        ServerError: the model fails on them.
    """
    started = time.monotonic()
    size = engine.model.config.block_size
    vocabulary = engine.tokenizer.n_vocab
    await _generate(engine, [[engine.tokenizer.start] * max(1, size - WARM_TOKENS)], WARM_TOKENS)
    # They begin differently, or the first would be computed for all.
    short = max(1, min(32, size - WARM_TOKENS))
    count = min(texts, engine.capacity)
    await _generate(engine, [[i % vocabulary] * short for i in range(count)], WARM_TOKENS)
    log.info("warmed up in %.1f s", time.monotonic() - started)


async def _generate(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> None:
    params = SamplingParams(max_tokens=tokens, temperature=0, seed=0)
    starter = Starter(engine.model.config, engine.tokenizer)

    async def one(prompt: list[int]) -> None:
        with contextlib.suppress(QueueFullError):  # --max-waiting-tokens allows for no more
            async for _ in engine.submit(Asked([starter.start(prompt, params)])):
                pass

    try:
        await asyncio.gather(*(one(prompt) for prompt in prompts))
    except GenerationFailedError as error:
        raise ServerError(
            f"the model failed on its first prompt ({error}); is the checkpoint damaged, or did "
            "its training diverge?"
        ) from None
