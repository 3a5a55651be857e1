"""A conversation that fits into a model's context: its oldest turns are forgotten first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpt.chat.turns import ASSISTANT, SYSTEM, USER, Turn
from gpt.errors import PromptError

ANSWER_SHARE = 4
"""Of the context, one part in so many is kept free for an answer that may be of any length."""


@dataclass
class Conversation:
    """What was said, without the system message.

    Attributes:
        system: what stands before all turns; None: what the template itself has for that.
        turns: by turns of user and assistant; the last may still be without an answer.
    """

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self) -> list[Turn]:
        system = [] if self.system is None else [Turn(SYSTEM, self.system)]
        return [*system, *self.turns]

    def unanswered(self) -> Turn | None:
        """Take the last answer away, and return what it answered; None: there is nothing."""
        if self.turns and self.turns[-1].role == ASSISTANT:
            self.turns.pop()
        return self.turns[-1] if self.turns else None

    def prompt(
        self,
        encode: Callable[[Sequence[Turn]], list[int]],
        block_size: int,
        max_tokens: int | None,
    ) -> tuple[list[int], int]:
        """Its ids, with room for an answer behind them, and how many turns were forgotten for that.

        Args:
            encode: as `gpt.chat.turns.ChatEncoder`.
            block_size: tokens that the context holds.
            max_tokens: most tokens of the answer, if it is known.

        Raises:
            PromptError: what is to be answered does not fit, alone.
            ChatTemplateError: as `encode`.
        """
        share = max(1, block_size // ANSWER_SHARE)
        room = block_size + 1 - min(share, max_tokens or share)
        turns = self.turns
        while len(ids := encode(Conversation(self.system, turns).messages())) > room:
            later = [i for i, turn in enumerate(turns) if turn.role == USER and i > 0]
            if not later:
                raise PromptError(
                    f"the message takes {len(ids)} tokens with the system message and the "
                    f"template's own, but the context of {block_size} leaves {room} beside the "
                    "answer; shorten it, or give less to the answer (max_tokens)"
                )
            turns = turns[later[0] :]
        forgotten = len(self.turns) - len(turns)
        self.turns = turns
        return ids, forgotten
