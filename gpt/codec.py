"""Text to ids by a `tiktoken.Encoding`, for vocabularies whose ids are ranks and for others.

tiktoken merges, of all neighbours whose union is a token, those with the lowest rank first, and
calls a token by its rank. Where ids are in another order, ranks are mapped to ids afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tiktoken

from gpt.errors import TokenizerError
from gpt.merging import leftover
from gpt.rules import Rules


class Codec:
    """Encodes pieces of text that are ready to be split.

    Attributes:
        encoding: the tiktoken encoding that does the work. Its ids are ranks.
        missing: bytes without a token of their own.
    """

    def __init__(
        self,
        name: str,
        pattern: str,
        tokens: Sequence[bytes],
        special: Mapping[str, int],
        rules: Rules,
    ) -> None:
        """A codec for a vocabulary.

        Args:
            name: of the encoding.
            tokens: bytes by id; empty ones take no part.
            special: ids by name of what no text becomes.

        Raises:
            TokenizerError: tokens that are the same, or an order that does not fit them.
        """
        self._ids: list[int] | None = None
        self._spelled: dict[int, list[int]] = {}
        if rules.order is None:
            self._ranks = {token: rank for rank, token in enumerate(tokens) if token}
            given = sum(map(bool, tokens))
        else:
            _check_order(rules.order, tokens)
            if rules.characters:
                self._ranks, self._ids, self._spelled = _by_character(rules.order, tokens)
            else:
                self._ranks = {tokens[token]: rank for rank, token in enumerate(rules.order)}
                self._ids = list(rules.order)
            given = len(self._ids)
        if not self._ranks or len(self._ranks) != given:
            raise TokenizerError(
                f"a vocabulary of {given} tokens is not usable: it needs one at least, and each "
                "must be different"
            )
        self.missing = frozenset(b for b in range(256) if bytes([b]) not in self._ranks)
        try:
            self.encoding = tiktoken.Encoding(
                name,
                pat_str=pattern,
                mergeable_ranks=self._ranks,
                special_tokens=dict(special) if self._ids is None else {},
            )
        except ValueError as error:
            raise TokenizerError(f"the split pattern {pattern!r} is not valid: {error}") from None

    @property
    def ranks(self) -> Mapping[bytes, int]:
        """Of all that can come of merging."""
        return self._ranks

    def encode(self, text: str) -> list[int]:
        """The ids of a text, which must be expressible. Raises TokenizerError where tiktoken
        panics all the same."""
        try:
            ranks = self.encoding.encode_ordinary(text)
        except BaseException as error:  # noqa: BLE001 (Rust panics are no Exceptions)
            raise unless_panic(error, "this text cannot be tokenized") from None
        if self._ids is None:
            return ranks
        ids = self._ids
        if not self._spelled:
            return [ids[rank] for rank in ranks]
        found: list[int] = []
        for rank in ranks:
            if rank in self._spelled:
                found += self._spelled[rank]
            else:
                found.append(ids[rank])
        return found

    def left_over(self, piece: bytes) -> int | None:
        """Index of the first byte that merging leaves without a token, or None."""
        return leftover(piece, self._ranks)


def _check_order(order: Iterable[int], tokens: Sequence[bytes]) -> None:
    seen = set()
    for token in order:
        if not (type(token) is int and 0 <= token < len(tokens) and tokens[token]):
            raise TokenizerError(
                f"the order of merging names {repr(token)[:40]}, which is no token"
            )
        if token in seen:
            raise TokenizerError(f"the order of merging names the token {token} twice")
        seen.add(token)


def _is_symbol(token: bytes) -> bool:
    return len(token) == 1 or (len(token) <= 4 and len(token.decode(errors="ignore")) == 1)


def _by_character(
    order: Sequence[int], tokens: Sequence[bytes]
) -> tuple[dict[bytes, int], list[int], dict[int, list[int]]]:
    """Ranks under which bytes become whole characters before anything else merges.

    The first bytes of a character merge into something that is no token. If the character is none
    either, it is left over, and stands for the tokens of its bytes.
    """
    by_byte = {tokens[token]: token for token in order if len(tokens[token]) == 1}
    if len(by_byte) < 256:
        raise TokenizerError(
            "a vocabulary of characters needs a token for each of the 256 bytes, for what has none"
        )
    symbols = [token for token in order if _is_symbol(tokens[token])]
    # A prefix is shorter than its character, so it merges first.
    parts: dict[bytes, int | None] = {}
    for token in symbols:
        data = tokens[token]
        for size in range(2, len(data)):
            parts.setdefault(data[:size], None)
        parts[data] = token
    if len(parts) < len(symbols) or any(parts[tokens[token]] != token for token in symbols):
        raise TokenizerError("two tokens of the vocabulary are the same character")
    first = sorted(parts.items(), key=lambda item: (len(item[0]), item[0]))
    rest = [(tokens[token], token) for token in order if not _is_symbol(tokens[token])]
    ranks: dict[bytes, int] = {}
    ids: list[int] = []
    spelled: dict[int, list[int]] = {}
    for data, id_ in [*first, *rest]:
        rank = len(ids)
        ranks[data] = rank
        if id_ is None:
            spelled[rank] = [by_byte[data[i : i + 1]] for i in range(len(data))]
            id_ = by_byte[data[:1]]
        ids.append(id_)
    return ranks, ids, spelled


def unless_panic(error: BaseException, message: str) -> BaseException:
    """`error` itself, or a TokenizerError if it is a panic of the Rust code.

    A panic is no `Exception`: left alone it would end a worker thread without a word. What is known
    to cause one is dealt with before the call; this is the net under it.
    """
    if type(error).__name__ != "PanicException":
        return error
    return TokenizerError(f"{message}: {error}")
