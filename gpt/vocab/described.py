"""A vocabulary of pairs, whatever file it came from, and the tokenizer that is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpt.errors import TokenizerError
from gpt.rules import BLANK, Rules
from gpt.splitting import CHAR_PATTERN, Splitter
from gpt.tokenizer import Tokenizer
from gpt.vocab.files import MAX_TOKEN
from gpt.vocab.merges import by_pairs, by_scores
from gpt.vocab.spelling import BYTE_OF, byte_of_token, byte_token, text_bytes, unspelled

NO_TEXT = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
"""Bytes that no text in UTF-8 has."""

DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>")
"""What stands between documents in the text that models are first trained on."""

WORDS = (r"\n| *[^ \n]+| +", r" *[^ ]+| +")
"""Ways to cut text for a vocabulary that knows no split: each holds where no token reaches across
one of its borders, and each border depends on the two characters beside it alone."""


@dataclass(frozen=True)
class BpeVocabulary:
    """What files say.

    Attributes:
        vocab: ids by token as it is spelled, special ones perhaps among them.
        merges: rank of each pair.
        scores: instead of merges: of each token, where the union decides.
        special: ids by name.
        always: names of special tokens that are taken wherever they stand.
        pattern: how text is split; None if it is not, empty if it is not and nothing merges.
        characters: tokens are text in which ▁ is a space, not spelled bytes.
        byte_fallback: a character without a token becomes byte tokens.
        unknown: the token of what cannot be expressed.
        ignore_merges: a word that is a token becomes it without merging.
        normalizer, prefix: as in `gpt.rules.Rules`.
        end_of_text, begin, ends: as in `gpt.tokenizer.Tokenizer`.
    """

    vocab: Mapping[str, int]
    merges: Mapping[tuple[str, str], int]
    special: Mapping[str, int]
    end_of_text: str
    always: Sequence[str] = ()
    pattern: str | None = None
    characters: bool = False
    byte_fallback: bool = False
    unknown: str | None = None
    ignore_merges: bool = False
    normalizer: str = ""
    prefix: str = ""
    begin: str | None = None
    ends: Sequence[str] = ()
    scores: Mapping[str, float] = field(default_factory=dict)


def choose_ends(
    special: Mapping[str, int], named: Sequence[str], ids: Sequence[int]
) -> tuple[str, list[str]]:
    """Which token stands between documents, and which others end what a model makes.

    A model that was trained to converse names the end of a turn; what stood between the documents
    of its first training is a special token still.

    Args:
        special: ids by name.
        named, ids: tokens that end a text, as the files have them, by name and by id.

    Raises:
        TokenizerError: no token that could end a text.
    """
    by_id = {id_: name for name, id_ in special.items()}
    given = [name for name in named if name in special]
    given += [by_id[id_] for id_ in ids if id_ in by_id]
    given = list(dict.fromkeys(given))
    usual = [name for name in DOCUMENT_ENDS if name in special]
    known = [name for name in given if name in DOCUMENT_ENDS]
    chosen = next(iter([*known, *usual, *given]), None)
    if chosen is None:
        raise TokenizerError(
            "no special token of it ends a text; name one as eos_token in tokenizer_config.json"
        )
    return chosen, [name for name in given if name != chosen]


def build(given: BpeVocabulary) -> Tokenizer:
    """The tokenizer of a vocabulary.

    Raises:
        TokenizerError: it cannot be taken over exactly; the reason is named.
    """
    ordinary = {token: id_ for token, id_ in given.vocab.items() if token not in given.special}
    for token in ordinary:
        if len(token) > MAX_TOKEN:
            raise TokenizerError(f"the token {token[:20]!r}… has over {MAX_TOKEN} characters")
    make = _by_characters if given.characters else _by_bytes
    pattern, tokens, order = make(given, ordinary)
    # Where ids are ranks, nothing needs to be said of them.
    plain = order == [id_ for id_, token in enumerate(tokens) if token]
    return Tokenizer(
        "bpe",
        pattern,
        tokens,
        special=given.special,
        end_of_text=given.end_of_text,
        begin=given.begin,
        ends=given.ends,
        rules=Rules(
            order=None if plain else tuple(order),
            characters=given.characters,
            normalizer=given.normalizer,
            prefix=given.prefix,
            always=tuple(given.always),
        ),
    )


def _by_bytes(
    given: BpeVocabulary, ordinary: Mapping[str, int]
) -> tuple[str, list[bytes], list[int]]:
    missing = {byte for char, byte in BYTE_OF.items() if char not in ordinary}
    if missing - NO_TEXT and given.unknown:
        raise TokenizerError(
            f"{len(missing)} bytes have no token of their own and become {given.unknown[:40]!r}, "
            "which loses text; not supported"
        )
    spelled = {token for token in ordinary if all(char in BYTE_OF for char in token)}
    order = [token for char in BYTE_OF if (token := char) in ordinary]
    order.sort(key=ordinary.__getitem__)
    whole = [t for t in ordinary if t in spelled and all(char in ordinary for char in t)]
    order += by_pairs(whole, given.merges, list, ignore_merges=given.ignore_merges)
    pattern = given.pattern
    if not pattern:
        if given.merges or given.ignore_merges or pattern is None:
            raise TokenizerError("its text is not split into words before merging; not supported")
        pattern = CHAR_PATTERN
    tokens = _placed({token: unspelled(token) for token in ordinary}, ordinary)
    return pattern, tokens, [ordinary[token] for token in order]


def _by_characters(
    given: BpeVocabulary, ordinary: Mapping[str, int]
) -> tuple[str, list[bytes], list[int]]:
    bytes_ = {token: byte for token in ordinary if (byte := byte_of_token(token)) is not None}
    if not given.byte_fallback or len(bytes_) < 256:
        raise TokenizerError(
            "characters without a token do not become byte tokens (byte_fallback), so text would "
            "be lost; not supported"
        )
    for left, right in given.merges:
        if left in bytes_ or right in bytes_ or left + right in bytes_:
            raise TokenizerError(f"its byte tokens merge ({left[:20]!r}, {right[:20]!r})")

    def symbols(token: str) -> list[str]:
        found: list[str] = []
        for char in token:
            known = char in ordinary
            found += [char] if known else [byte_token(byte) for byte in char.encode()]
        return found

    # A space that is written as such is never seen: text has ▁ by then.
    usable = [t for t in ordinary if t not in bytes_ and " " not in t and _is_text(t)]
    if given.scores:
        ordered = by_scores({token: given.scores[token] for token in usable}, symbols)
    else:
        ordered = by_pairs(usable, given.merges, symbols, ignore_merges=given.ignore_merges)
    single = {text_bytes(token): token for token in usable if len(token) == 1}
    for token, byte in bytes_.items():
        single.setdefault(bytes([byte]), token)
    pattern = given.pattern or _words(ordered)
    if given.ignore_merges and given.pattern is None:
        raise TokenizerError("a whole text that is a token becomes it (ignore_merges)")
    tokens = _placed({token: text_bytes(token) for token in ordinary}, ordinary)
    return pattern, tokens, [ordinary[token] for token in [*single.values(), *ordered]]


def _is_text(token: str) -> bool:
    return not any(0xD800 <= ord(char) < 0xE000 for char in token)


def _words(tokens: Sequence[str]) -> str:
    """A split that no token reaches across."""
    texts = [token.replace(BLANK, " ") for token in tokens]
    for pattern in WORDS:
        splitter = Splitter(pattern)
        if all(next(iter(splitter.pieces(text))) == text for text in texts):
            return pattern
    raise TokenizerError(
        "its tokens reach across the spaces between words, and its text is not split; such a text "
        "would have to be encoded whole, which is not supported"
    )


def _placed(data: Mapping[str, bytes], ids: Mapping[str, int]) -> list[bytes]:
    tokens = [b""] * (1 + max(ids.values(), default=0))
    for token, id_ in ids.items():
        tokens[id_] = data[token]
    return tokens
