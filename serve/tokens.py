"""Tokenize and Detokenize: between text and ids, with all that is wrong with a request at once."""

from __future__ import annotations

import numpy as np

from gpt.errors import InexpressibleTextError, TokenizerError
from gpt.tokenizer import Tokenizer
from serve.requests import MAX_TEXT_BYTES, InvalidRequestError, inexpressible
from serve.status import MAX_VIOLATIONS
from serve.v1 import generation_pb2 as pb

MAX_IDS = 1 << 20
"""Together with the text's limit they bound what a request costs in time, memory and answer."""

NO_TOKEN = -1


class TokenReader:
    """Answers for one vocabulary. It takes time: not for an event loop's thread.

    Args:
        model: name of the model whose vocabulary it is.
        max_text_bytes: longest text that is tokenized.
    """

    def __init__(
        self, model: str, tokenizer: Tokenizer, max_text_bytes: int = MAX_TEXT_BYTES
    ) -> None:
        self._max_text_bytes = max_text_bytes
        self._model = model
        self._tokenizer = tokenizer
        self._special = {token: name.encode() for name, token in tokenizer.special.items()}
        self._pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.n_vocab)]
        self._lengths = np.array(
            [
                len(piece) if piece or token in self._special else NO_TOKEN
                for token, piece in enumerate(self._pieces)
            ]
        )

    def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Raises InvalidRequestError."""
        size = len(request.text.encode())
        if size > self._max_text_bytes:
            raise InvalidRequestError(
                [("text", f"{size} bytes long, {self._max_text_bytes} allowed; send it in parts")]
            )
        try:
            ids = self._tokenizer.encode(
                request.text, special=self._tokenizer.special if request.special else False
            )
        except InexpressibleTextError as error:
            description = inexpressible(error, self._tokenizer.kind)
            raise InvalidRequestError([("text", description)]) from None
        except TokenizerError as error:
            raise InvalidRequestError([("text", str(error))]) from None
        response = pb.TokenizeResponse(model=self._model, count=len(ids), ids=ids)
        if not request.ids_only:
            # End-of-text has no bytes of its own, but here it stands for its name.
            pieces = [self._pieces[token] or self._special[token] for token in ids]
            response.pieces.extend(pieces)
            lengths = np.array([0, *map(len, pieces)])
            response.starts.extend(lengths.cumsum()[: len(pieces)].tolist())
        return response

    def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Raises InvalidRequestError."""
        count = len(request.ids)
        if count > MAX_IDS:
            raise InvalidRequestError(
                [("ids", f"{count} ids given, {MAX_IDS} allowed; send them in parts")]
            )
        ids = np.array(list(request.ids), dtype=np.int64)
        self._check(ids)
        size = int(self._lengths[ids].sum())
        if size > MAX_TEXT_BYTES:
            raise InvalidRequestError(
                [("ids", f"their text has {size} bytes, {MAX_TEXT_BYTES} allowed; send fewer ids")]
            )
        data = b"".join(map(self._pieces.__getitem__, request.ids))
        return pb.DetokenizeResponse(
            model=self._model, text=data.decode("utf-8", errors="replace"), data=data
        )

    def _check(self, ids: np.ndarray) -> None:
        """Raises InvalidRequestError that lists the first ids that are no tokens."""
        n_vocab = len(self._pieces)
        inside = ids < n_vocab
        known = inside & (self._lengths[np.where(inside, ids, 0)] != NO_TOKEN)
        places = np.flatnonzero(~known)
        if not len(places):
            return
        violations = []
        for place in places[: MAX_VIOLATIONS - 1].tolist():
            why = "is no token of" if inside[place] else "is outside"
            description = f"token id {ids[place]} {why} the vocabulary (0 to {n_vocab - 1})"
            violations.append((f"ids[{place}]", description))
        if rest := len(places) - len(violations):
            violations.append(("ids", f"and {rest} more"))
        raise InvalidRequestError(violations)
