"""Turns of a conversation as token ids: the template's special tokens, and nobody else's.

A template writes one text, in which `<|im_end|>` may be its own word or what somebody typed. The
two must not be taken for each other: what a user types must not steer the model. So a conversation
is rendered twice, once as it is and once with words that nobody could have guessed in place of what
was said. Where such a word comes out, there stands something said, and its names of special tokens
are ordinary text.

A template may trim what was said: the word is given the same blanks around it. A template may look
into it, too (what a model thought aloud is often cut off): the two texts are then not the same, and
only the names themselves are hidden instead, so that it sees the rest. If that does not help, no
ids are made.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import regex

from gpt.chat.template import ChatTemplate
from gpt.errors import ChatTemplateError
from gpt.rules import After
from gpt.specials import SpecialFinder
from gpt.tokenizer import Tokenizer

ASSISTANT, SYSTEM, USER = "assistant", "system", "user"


@dataclass(frozen=True)
class Turn:
    """Something that was said.

    Attributes:
        role: `system`, `user` or `assistant`.
        own: special tokens that the model itself made in saying it; their names in the content are
            those tokens.
    """

    role: str
    content: str
    own: frozenset[str] = frozenset()

    def message(self, content: str | None = None) -> dict[str, str]:
        return {"role": self.role, "content": self.content if content is None else content}


@dataclass(frozen=True)
class _Hidden:
    """What a word in a rendered text stands for."""

    text: str
    own: Collection[str]


class _Hiding:
    """Words in place of what was said, for one rendering."""

    def __init__(self, names: Iterable[str]) -> None:
        self._key = secrets.token_hex(12)
        self._found = re.compile(f"q{self._key}n([0-9]+)z")
        self._hidden: list[_Hidden] = []
        ordered = sorted(names, key=len, reverse=True)
        self._names = regex.compile("|".join(map(regex.escape, ordered)) if ordered else "(?!)")

    def whole(self, turn: Turn) -> dict[str, str]:
        """All of it but the blanks around it; they are what a template takes off."""
        core = turn.content.strip()
        if not core:
            return turn.message()
        before, _, after = turn.content.partition(core)
        return turn.message(before + self._word(_Hidden(core, turn.own)) + after)

    def names(self, turn: Turn) -> dict[str, str]:
        """The names in it that are not special tokens."""

        def hide(match: regex.Match[str]) -> str:
            name = match.group()
            return name if name in turn.own else self._word(_Hidden(name, ()))

        return turn.message(self._names.sub(hide, turn.content))

    def _word(self, hidden: _Hidden) -> str:
        self._hidden.append(hidden)
        return f"q{self._key}n{len(self._hidden) - 1}z"

    def parts(self, text: str) -> Iterator[str | _Hidden]:
        """A rendered text in its order: the template's words, and what was hidden."""
        for i, part in enumerate(self._found.split(text)):
            if i % 2 == 0:
                yield part
            elif len(part) < 10 and int(part) < len(self._hidden):
                yield self._hidden[int(part)]


class ChatEncoder:
    """Encodes turns as a template would have them.

    Args:
        template: with `template_variables` of the tokenizer.
        tokenizer: has the special tokens that the template writes.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        # Tokens of blanks alone steer nothing, and stand in texts as other tokens do.
        self._names = [name for name in tokenizer.special if name.strip()]
        self._finder = SpecialFinder(self._names)
        always = [name for name in self._names if name in tokenizer.rules.always and len(name) > 1]
        self._always = SpecialFinder(always) if always else None

    def __call__(self, turns: Sequence[Turn]) -> list[int]:
        """The ids that make the model say the next turn.

        A token that stands before every text (begin-of-sequence) comes once, whether the template
        writes it or not.

        Raises:
            ChatTemplateError: as `ChatTemplate.render`; or a turn has the name of a special token,
                and the template changes what it is given in a way that hides where it stands.
            TokenizerError: text that the vocabulary cannot express.
        """
        ids: list[int] = []
        after: After = ""
        for named, text in self._apart(turns):
            ids += [self._tokenizer.special[text]] if named else self._ordinary(text, after)
            after = "token" if named else "text"
        begin = self._tokenizer.begin
        if begin is not None and ids[:1] != [self._tokenizer.special[begin]]:
            ids.insert(0, self._tokenizer.special[begin])
        return ids

    def end_of_turn(self) -> int | None:
        """The special token that the template puts behind what the assistant says, if it does."""
        hiding = _Hiding(())
        asked = [Turn(USER, "?").message(), hiding.whole(Turn(ASSISTANT, "!"))]
        try:
            (text,) = self._template.render([asked], add_generation_prompt=False)
        except ChatTemplateError:
            return None
        parts = [*hiding.parts(text)]
        behind = parts[-1] if len(parts) > 1 and isinstance(parts[-1], str) else ""
        for named, words in self._finder.stretches([behind.lstrip()]):
            return self._tokenizer.special[next(words)] if named else None
        return None

    def _apart(self, turns: Sequence[Turn]) -> Iterator[tuple[bool, str]]:
        """The rendered text in stretches: (it is a special token, its text)."""
        stretches: list[tuple[bool, str]] = []
        for part in self._rendered(turns):
            own = self._names if isinstance(part, str) else part.own
            text = part if isinstance(part, str) else part.text
            for named, words in self._found(text, own):
                if not named and stretches and not stretches[-1][0]:
                    # What is said goes on from the template's words, without a border.
                    stretches[-1] = (False, stretches[-1][1] + "".join(words))
                else:
                    stretches.extend((named, word) for word in words)
        return iter(stretches)

    def _found(self, text: str, names: Collection[str]) -> Iterator[tuple[bool, Iterable[str]]]:
        if not text:
            return
        if not names:
            yield False, [text]
            return
        finder = self._finder if len(names) == len(self._names) else SpecialFinder(names)
        for named, words in finder.stretches([text]):
            yield named, words if named else ["".join(words)]

    def _ordinary(self, text: str, after: After) -> list[int]:
        """The ids of text that has no special tokens, whatever it spells."""
        start = 0
        # Some vocabularies take names wherever they stand; one that is cut in two is none.
        for named, words in self._always.stretches([text]) if self._always else ():
            for word in words:
                if named:
                    cut = start + 1
                    return [
                        *self._ordinary(text[:cut], after),
                        *self._ordinary(text[cut:], "text"),
                    ]
                start += len(word)
        return self._tokenizer.encode(text, after=after)

    def _rendered(self, turns: Sequence[Turn]) -> list[str | _Hidden]:
        for hide in (_whole, _whole_but_answers, _names):
            hiding = _Hiding(self._names)
            hidden = [hide(hiding, turn) for turn in turns]
            texts = self._template.render([[turn.message() for turn in turns], hidden])
            parts = [*hiding.parts(texts[1])]
            if "".join(p if isinstance(p, str) else p.text for p in parts) == texts[0]:
                if hide is not _whole:
                    self._check_edges(turns)
                return parts
        raise ChatTemplateError(_spelt(turns, self._names))

    def _check_edges(self, turns: Sequence[Turn]) -> None:
        """Raises ChatTemplateError if the template's words could complete a name that a turn begins
        or ends with: where a turn stands in sight, nothing tells the two apart."""
        for turn in turns:
            for name in self._names:
                for n in range(2, len(name)):
                    if turn.content.endswith(name[:n]) or turn.content.startswith(name[-n:]):
                        raise ChatTemplateError(
                            f"what the {turn.role} says begins or ends with a part of the special "
                            f"token {name}, which this chat template could complete; leave it out"
                        )


Hide = Callable[[_Hiding, Turn], dict[str, str]]


def _whole(hiding: _Hiding, turn: Turn) -> dict[str, str]:
    return hiding.whole(turn)


def _whole_but_answers(hiding: _Hiding, turn: Turn) -> dict[str, str]:
    return hiding.names(turn) if turn.role == ASSISTANT else hiding.whole(turn)


def _names(hiding: _Hiding, turn: Turn) -> dict[str, str]:
    return hiding.names(turn)


def _spelt(turns: Sequence[Turn], names: Iterable[str]) -> str:
    found = [
        f"what the {turn.role} says has {name}"
        for turn in turns
        for name in names
        if name in turn.content and name not in turn.own
    ]
    why = found[0] if found else "a turn has the name of a special token"
    return (
        f"{why}, the name of a special token, and this chat template changes what it is given in a "
        "way that hides where it stands; leave it out, or begin a new conversation"
    )


def template_variables(tokenizer: Tokenizer) -> dict[str, str]:
    """What templates call by these names. One that a tokenizer does not have is empty."""
    return {
        "bos_token": tokenizer.begin or "",
        # A model made to converse ends its turns with the first of them.
        "eos_token": tokenizer.ends[0] if tokenizer.ends else tokenizer.end_of_text,
    }
