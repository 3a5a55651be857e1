"""What both clients know of a text that is being made, and when they ask for it again. They differ
in how they wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from serve.connection import Connection
from serve.errors import RequestError
from serve.retry import Deadline, Retry

if TYPE_CHECKING:
    from serve.results import Finish, TokenScore


class TextStream:
    """A text that is being made: what has been told of it so far.

    Attributes:
        request_id, model, model_version, prompt_tokens, seed: known once the first delta, or the
            end, has come.
        finishes: how the texts ended, by their choice.
        prompt_scores: how likely the tokens of the prompt were, if that was asked for.
    """

    def __init__(
        self,
        open_call: Callable[[float | None], Any],
        connection: Connection,
        retry: Retry,
        limit: float | None,
    ) -> None:
        self._open_call = open_call
        self._connection = connection
        self._retry = retry
        self._deadline = Deadline(limit)
        self._failures = 0
        self._cancelled = False
        self._open(limit)

    def _open(self, limit: float | None) -> None:
        from serve.operations import StreamState

        self._state = StreamState()
        self._call = self._open_call(limit)

    def _pause(self, error: RequestError) -> float:
        """Seconds to wait before it is asked for again; raises the error if it is not."""
        self._failures += 1
        seconds = self._retry.wait(error, self._failures, self._deadline.left)
        if seconds is None or self._state.begun or self._cancelled:
            raise error
        return seconds

    def cancel(self) -> None:
        """Tell the server to stop. Harmless when the text is over."""
        self._cancelled = True
        self._call.cancel()

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def model(self) -> str:
        return self._state.model

    @property
    def model_version(self) -> str:
        """Of the model that makes the text, whatever is served by now."""
        return self._state.model_version

    @property
    def prompt_tokens(self) -> int:
        return self._state.prompt_tokens

    @property
    def seed(self) -> int:
        return self._state.seed

    @property
    def finishes(self) -> dict[int, Finish]:
        return self._state.finishes

    @property
    def prompt_scores(self) -> list[TokenScore]:
        return self._state.prompt_scores

    @property
    def finish(self) -> Finish | None:
        """How the first text ended; None until then."""
        return self._state.finish
