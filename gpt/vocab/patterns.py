"""Split patterns of other libraries as one regular expression that tiktoken has.

Hugging Face's engine is Oniguruma, whose syntax gives some signs another meaning. Taken is what
means the same in both; their character classes agree on every code point.
"""

from __future__ import annotations

import re
from typing import Any

from gpt.errors import TokenizerError
from gpt.splitting import CL100K_PATTERN, GPT2_PATTERN, GPT4_PATTERN

_LLAMA_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = rf"{_LLAMA_WORDS}|\p{{N}}{{1,3}}|{_LLAMA_REST}"
"""As GPT-4's, spelled as Llama 3 has it."""
QWEN2_PATTERN = rf"{_LLAMA_WORDS}|\p{{N}}|{_LLAMA_REST}"
"""The same with each digit on its own."""

_GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
DIGITS_PATTERN = rf"\p{{N}}|{_GPT2_WORDS}"
"""GPT-2's split after each digit was cut out: blanks before one are the end of their text."""
NUMBERS_PATTERN = rf"\p{{N}}+|{_GPT2_WORDS}"
"""The same after runs of digits were cut out."""

GGUF_NAMES = {
    "gpt-2": GPT2_PATTERN,
    "smollm": DIGITS_PATTERN,
    "llama-bpe": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "starcoder": DIGITS_PATTERN,
    "refact": DIGITS_PATTERN,
    "codeshell": DIGITS_PATTERN,
    "phi-2": GPT2_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "llama-v3": LLAMA3_PATTERN,
}
"""Split patterns by llama.cpp's names; of several names for one the first is written."""
NAMES = {pattern: name for name, pattern in reversed(GGUF_NAMES.items())} | {
    GPT4_PATTERN: "llama-bpe"
}
"""And the inverse. GPT-4's pattern makes the same pieces as Llama 3's, spelled otherwise."""

_CATEGORIES = re.compile(r"L[ulmot]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|Han")
_ITEM = re.compile(
    r"""
    (?P<property> \\[pP]\{(?P<name>\w+)\} )
  | (?P<escape> \\[sSdDrnt] | \\[^\w\s] )
  | (?P<class> \[\^? )
  | (?P<group> \((?!\?) | \(\?(?: : | i: | = | ! | > ) )
  | (?P<close> \) )
  | (?P<repeat> [?*+][?+]? | \{\d+(?:,\d*)?\} (?![?+]) )
  | (?P<bar> \| )
  | (?P<text> [^\\\[\](){}.^$|?*+] )
    """,
    re.VERBOSE,
)
_CLASS_ITEM = re.compile(
    r"\\[pP]\{(?P<name>\w+)\}|\\[sSdDrnt]|\\[^\w\s]|&(?!&)|-(?!-)|~(?!~)|[^\\\[\]&~-]"
)
# Whole words that one letter of a foreign alphabet stands for where case does not count.
_FOLDED = re.compile(r"s[st]|f[fil]|[^\x00-\x7f]", re.IGNORECASE)


def common(pattern: str) -> str:
    """The same pattern, if it means the same here as in Oniguruma.

    Raises:
        TokenizerError: it has something that may not.
    """
    place = 0
    while place < len(pattern):
        found = _ITEM.match(pattern, place)
        if found is None or (found["name"] and not _CATEGORIES.fullmatch(found["name"])):
            raise _unlike(pattern, place)
        place = _class_end(pattern, found.end()) if found["class"] else found.end()
    for inner in re.findall(r"\(\?i:([^()]*)", pattern):
        if _FOLDED.search(inner):
            raise _unlike(pattern, pattern.index(inner))
    return pattern


def _class_end(pattern: str, place: int) -> int:
    start = place
    while place < len(pattern) and (place == start or pattern[place] != "]"):
        found = _CLASS_ITEM.match(pattern, place)
        if found is None or (found["name"] and not _CATEGORIES.fullmatch(found["name"])):
            raise _unlike(pattern, place)
        place = found.end()
    if place >= len(pattern):
        raise _unlike(pattern, start)
    return place + 1


def _unlike(pattern: str, place: int) -> TokenizerError:
    return TokenizerError(
        f"the split pattern {pattern[:80]!r} has {pattern[place : place + 12]!r}, which may not "
        "mean the same to another engine; it cannot be taken over exactly"
    )


def for_oniguruma(pattern: str) -> str:
    """A pattern of ours as Hugging Face's engine has to be given it.

    Raises:
        TokenizerError: it has something that may mean something else there.
    """
    if pattern == CL100K_PATTERN:  # the end of a line, there
        return common(pattern.replace(r"\s++$|", "")).replace(r"|\s*[\r\n]|", r"|\s++\z|\s*[\r\n]|")
    return common(pattern)


def of_pre_tokenizer(described: Any) -> tuple[str, str]:
    """The split pattern of a byte-level `pre_tokenizer`, and the prefix that it asks for.

    Raises:
        TokenizerError: one that is not known here.
    """
    steps = _steps(described)
    kinds = [step.get("type") for step in steps]
    if not kinds or kinds[-1] != "ByteLevel" or "ByteLevel" in kinds[:-1]:
        raise _unknown(kinds)
    use_regex = steps[-1].get("use_regex", True)
    prefix = "missing" if steps[-1].get("add_prefix_space", True) else ""
    if kinds == ["ByteLevel"]:
        return (GPT2_PATTERN if use_regex else ""), prefix
    if prefix:
        raise TokenizerError(
            "the pre-tokenizer puts a space before each piece of a text (add_prefix_space after "
            f"{kinds[0]}), which is not supported"
        )
    if kinds == ["Digits", "ByteLevel"] and use_regex:
        return (DIGITS_PATTERN if steps[0].get("individual_digits") else NUMBERS_PATTERN), prefix
    if kinds == ["Split", "ByteLevel"]:
        pattern = _split(steps[0])
        if not use_regex:
            return pattern, prefix
        if pattern == r"\p{N}":
            return DIGITS_PATTERN, prefix
    raise _unknown(kinds)


def _steps(described: Any) -> list[dict[str, Any]]:
    if isinstance(described, dict) and described.get("type") == "Sequence":
        found = described.get("pretokenizers")
    else:
        found = [] if described is None else [described]
    if not (isinstance(found, list) and all(isinstance(step, dict) for step in found)):
        raise TokenizerError("its pre_tokenizer is damaged")
    return found


def _split(step: dict[str, Any]) -> str:
    how = (step.get("behavior"), bool(step.get("invert", False)))
    pattern = step.get("pattern")
    text = pattern.get("Regex") if isinstance(pattern, dict) else None
    # Where every character belongs to a match, which is checked, these two are the same.
    if not isinstance(text, str) or how not in (("Isolated", False), ("Removed", True)):
        raise TokenizerError(
            f"its pre_tokenizer splits by {repr(pattern)[:60]} in the way {how[0]!r}, which is not "
            "supported; only a regular expression with Isolated is"
        )
    return common(text)


def _unknown(kinds: list[Any]) -> TokenizerError:
    shown = ", ".join(str(kind)[:20] for kind in kinds[:6]) or "none"
    return TokenizerError(
        f"its pre_tokenizer ({shown}) is not supported; ByteLevel is, after Digits or one Split "
        "by a regular expression, or none"
    )
