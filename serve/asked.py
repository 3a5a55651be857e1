"""What a request asks of the engine: plain data on the way from the service."""

from __future__ import annotations

from dataclasses import dataclass

from gpt.sequence import Sequence

MAX_CHOICES = 16
MAX_PRIORITY = 100


@dataclass(frozen=True, eq=False)
class Asked:
    """Texts to be made from one prompt.

    Attributes:
        sequences: one for each text, in the order of their choices.
        before: bytes that each text begins with: those of the prompt, if it is to be echoed.
        time_limit: seconds from arrival after which the texts end with what there is.
    """

    sequences: list[Sequence]
    before: bytes = b""
    time_limit: float | None = None
