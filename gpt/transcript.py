"""Transcript: one sample as it grows; as a line of JSON, and as a table of log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gpt.params import Made, SamplingParams, TokenLogprob
from gpt.stream import FinishReason
from gpt.terminal import dim, padded, width

if TYPE_CHECKING:
    from gpt.generate import Piece


class Vocabulary(Protocol):
    """What of a tokenizer is needed here; a server's client has no more than that."""

    @property
    def special(self) -> Mapping[str, int]: ...

    def token_bytes(self, token: int, /) -> bytes: ...


@dataclass
class Transcript:
    """What was asked and what has come of it.

    Attributes:
        prompt: as it was given: text, or token ids.
        prompt_tokens: how many tokens the model read; the end-of-text that an empty prompt starts
            from counts.
        made: a token each, with its log-probability if that was asked for.
    """

    prompt: str | Seq[int]
    params: SamplingParams
    prompt_tokens: int
    choice: int = 0
    text: str = ""
    made: list[Made] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.made.append(Made(piece.token, piece.logprob, piece.top))
        self.finish_reason = piece.finish_reason
        self.matched_stop = piece.matched_stop

    def record(self, tokenizer: Vocabulary) -> dict[str, Any]:
        """As plain data for JSON. Log-probabilities are in nats."""
        given: dict[str, Any] = (
            {"prompt": self.prompt}
            if isinstance(self.prompt, str)
            else {"prompt_token_ids": list(self.prompt)}
        )
        found = given | {
            "choice": self.choice,
            "text": self.text,
            "token_ids": [made.token for made in self.made],
            "finish_reason": self.finish_reason and self.finish_reason.value,
            "matched_stop": self.matched_stop,
            "seed": self.params.seed,
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": len(self.made),
            },
        }
        if self.params.logprobs is not None:
            found["logprobs"] = [
                _token(tokenizer, made.token, made.logprob)
                | {"top": [_token(tokenizer, t.token, t.logprob) for t in made.top]}
                for made in self.made
            ]
        return found


def _token(tokenizer: Vocabulary, token: int, logprob: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {
        "token_id": token,
        "text": data.decode("utf-8", errors="replace"),
        "bytes": list(data),
        "logprob": logprob,
    }


def spelt(tokenizer: Vocabulary, token: int) -> str:
    """A token as a word of a table: quoted text, `b'…'` for part of a character, or its name."""
    for name, special in tokenizer.special.items():
        if special == token:
            return name
    data = tokenizer.token_bytes(token)
    try:
        return repr(data.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(data)


def table(made: Iterable[Made], tokenizer: Vocabulary, *, colour: bool = False) -> str:
    """Token, log-probability in nats and alternatives, a line for each token."""

    def entry(found: TokenLogprob) -> str:
        return f"{spelt(tokenizer, found.token)} {found.logprob:.3f}"

    rows = [
        (
            spelt(tokenizer, m.token),
            "" if m.logprob is None else f"{m.logprob:.3f}",
            "  ".join(map(entry, m.top)),
        )
        for m in made
    ]
    columns = max([5, *(width(token) for token, _, _ in rows)])
    head = f"{'token':{columns}}  {'logprob':>9}" + (
        "  most likely" if any(r[2] for r in rows) else ""
    )
    lines = [dim(head, colour)]
    lines += [
        f"{padded(token, columns)}  {logprob:>9}  {dim(top, colour)}".rstrip()
        for token, logprob, top in rows
    ]
    return "\n".join(lines) + "\n"
