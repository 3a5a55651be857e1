"""What an answer is made of: plain data, the same in the server's engine and in the client's hands.

`serve.wire` turns it into messages and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpt.params import Made

if TYPE_CHECKING:
    from gpt.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenScore:
    """A token and how likely it was at its place.

    Attributes:
        token: its id.
        piece: what it adds to the text: perhaps part of a character, nothing for special tokens.
        logprob: natural logarithm of its probability under the model's own distribution, before
            penalties, temperature and filters.
        top: the most likely tokens there, most likely first, as many as were asked for.
    """

    token: int
    piece: bytes
    logprob: float
    top: tuple[TokenScore, ...] = ()


def token_score(tokenizer: Tokenizer, made: Made) -> TokenScore:
    """What the sampler made, with the bytes of its tokens."""
    assert made.logprob is not None, "it is only there where log-probabilities were asked for"
    piece = tokenizer.token_bytes
    top = tuple(TokenScore(other.token, piece(other.token), other.logprob) for other in made.top)
    return TokenScore(made.token, piece(made.token), made.logprob, top)


@dataclass(frozen=True)
class Delta:
    """A piece of a text: what is now certain of it, and the tokens made since the last one.

    Attributes:
        scores: one for each of `token_ids` if log-probabilities were asked for, else none.
        pieces: the bytes of each of `token_ids`; none for one that ends the text.
        choice: which of several texts for the prompt it belongs to.
    """

    text: str
    token_ids: list[int]
    scores: list[TokenScore] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    choice: int = 0


@dataclass(frozen=True)
class Finish:
    """How a text ended.

    Attributes:
        reason: one of `gpt.stream.FinishReason`.
        matched_stop: the stop string that ended it.
        completion_tokens: tokens made, end-of-text and those of a stop string included.
        seed: makes the same text again.
        queue_seconds: from the request's arrival at the engine to its first step.
        prefill_seconds: from there to the first token.
        decode_seconds: from the first token to the last.
        cached_tokens: those of `prompt_tokens` that were found in the cache.
        matched_stop_token: the stop token that ended it.
        choice: which of several texts for the prompt it is.
    """

    reason: str
    matched_stop: str | None
    prompt_tokens: int
    completion_tokens: int
    seed: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    cached_tokens: int = 0
    matched_stop_token: int | None = None
    choice: int = 0


@dataclass(frozen=True)
class Choice:
    """A whole text.

    Attributes:
        scores: one for each of `token_ids` if log-probabilities were asked for, else none.
    """

    text: str
    token_ids: list[int]
    finish: Finish
    scores: list[TokenScore] = field(default_factory=list)


@dataclass(frozen=True)
class Completion:
    """What came of a request: one text, or several of the same prompt.

    Attributes:
        choices: the texts.
        request_id: the server's id of the request; its log uses it.
        model: name of the model that made it.
        prompt_scores: how likely each token of the prompt after the first was, if that was asked.
        model_version: which of the models of that name made it, all of it; see `ModelInfo`.
        text, token_ids, finish, scores: those of the first text.
    """

    choices: list[Choice]
    request_id: str
    model: str
    prompt_scores: list[TokenScore] = field(default_factory=list)
    model_version: str = ""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish(self) -> Finish:
        return self.choices[0].finish

    @property
    def scores(self) -> list[TokenScore]:
        return self.choices[0].scores


@dataclass(frozen=True)
class Scores:
    """How likely a model finds a text.

    Attributes:
        scores: one for each token of the text, the first given end-of-text.
        total_nats: the sum of all log-probabilities, negated.
        bits_per_byte: that per byte of text, in bits; None if the tokens have no bytes.
        byte_count: bytes of all tokens together.
        request_id, model, model_version: as in `Completion`.
        queue_seconds, prefill_seconds: as in `Finish`; the second is until the last token.
    """

    scores: list[TokenScore]
    total_nats: float
    bits_per_byte: float | None
    byte_count: int
    request_id: str
    model: str
    queue_seconds: float
    prefill_seconds: float
    model_version: str = ""


@dataclass(frozen=True)
class Tokenization:
    """A text cut into tokens.

    Attributes:
        ids: the tokens.
        pieces: the bytes of the text that each stands for; none if only ids were asked for.
        starts: where each piece begins, in bytes of the text's UTF-8; none as well.
        model: name of the model whose vocabulary it is.
    """

    ids: list[int]
    pieces: list[bytes]
    starts: list[int]
    model: str


@dataclass(frozen=True)
class Detokenization:
    """The text of tokens.

    Attributes:
        text: bytes that are not UTF-8 come as U+FFFD.
        data: the bytes exactly.
        model: name of the model whose vocabulary it is.
    """

    text: str
    data: bytes
    model: str


@dataclass(frozen=True)
class ModelInfo:
    """A model that is served. `architecture` holds plain values by their field's name.

    Attributes:
        special_tokens: the text of each special token and its id.
        end_of_text_id: the one of them that stands between documents.
        version: of what is served under the name now; equal versions are equal models.
    """

    name: str
    block_size: int
    vocab_size: int
    parameter_count: int
    dtype: str
    architecture: Mapping[str, int | str]
    tokenizer_kind: str
    tokenizer_fingerprint: str
    special_tokens: Mapping[str, int]
    end_of_text_id: int
    version: str = ""
