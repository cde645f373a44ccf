"""Tokens as a person reads them: without the marks of subwords, bytes as characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from manyheads.data.batches import unknown_id
from manyheads.view.document import contract
from manyheads.view.document.contract import Mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters of a token that are shown.
LONGEST = 80
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # what SentencePiece writes for a space
_SHOWN = {"\n": "↵", "\r": "␍", "\t": "⇥", " ": "␣", "\u3000": "□"}


class Token(NamedTuple):
    """A token: as the tokenizer writes it, as a person reads it, and what is particular about it.

    mark: ``joined`` (it continues the word before it), ``space`` (a space comes before it), ``special``,
        ``unknown`` (a word that the tokenizer does not know), ``newline``, ``byte`` (a part of a character),
        or None.
    """

    text: str
    shown: str
    mark: Mark

    def as_json(self) -> contract.Token:
        """The same for a document, cut to a length that can be read."""
        return {"text": cut(self.text), "shown": cut(self.shown), "mark": self.mark}


def token_texts(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int]) -> list[contract.Token]:
    """What each id stands for, for a tokenizer of any family; the number itself without a tokenizer.

    >>> from manyheads.models.embedded import load
    >>> tokens = token_texts(load()[1], [101, 15775, 4523, 102])
    >>> [(token["shown"], token["mark"]) for token in tokens]
    [('[CLS]', 'special'), ('cha', None), ('ps', 'joined'), ('[SEP]', 'special')]
    """
    if tokenizer is None:
        return [Token(str(i), str(i), None).as_json() for i in ids]
    special = {int(i) for i in getattr(tokenizer, "all_special_ids", None) or []}
    bytewise, unknown = _is_bytewise(tokenizer), unknown_id(tokenizer)
    tokens: list[Token] = []
    for i in ids:
        text = _text(tokenizer, int(i))
        if i == unknown:
            token = Token(text, visible(text), "unknown")
        else:
            token = Token(text, visible(text), "special") if i in special else read_token(text, bytewise)
        if token.mark is None and tokens and not text.startswith(_SPACE) and _continues(tokens[-1], token):
            token = token._replace(mark="joined") if bytewise or _spaced(tokenizer) else token
        tokens.append(token)
    return [token.as_json() for token in tokens]


def read_token(text: str, bytewise: bool = False) -> Token:
    """One token that is not special; ``bytewise`` if its characters stand for bytes, as in GPT-2.

    >>> read_token("##ing"), read_token("▁the"), read_token("Ġthe", bytewise=True)
    (Token(text='##ing', shown='ing', mark='joined'), Token(text='▁the', shown='the', mark='space'),
     Token(text='Ġthe', shown='the', mark='space'))
    >>> read_token("ä½ł", bytewise=True).shown, read_token("<0xE4>"), read_token("Ċ", bytewise=True)
    ('你', Token(text='<0xE4>', shown='E4', mark='byte'), Token(text='Ċ', shown='↵', mark='newline'))
    """
    if byte := _BYTE.fullmatch(text):
        code = int(byte[1], 16)
        return Token(text, byte[1].upper(), "byte") if code > 126 else _plain(text, chr(code))
    if bytewise:
        if not all(c in _BYTES for c in text):
            return Token(text, visible(text), None)  # added to the vocabulary as it is
        raw = bytes(_BYTES[c] for c in text)
        try:
            return _plain(text, raw.decode())
        except UnicodeDecodeError:
            return Token(text, raw.hex(" ").upper(), "byte")
    if text.startswith("##") and len(text) > 2:
        return Token(text, visible(text[2:]), "joined")
    return _plain(text, text.replace(_SPACE, " "))


def _plain(text: str, characters: str) -> Token:
    """A token that stands for these characters."""
    if characters and not characters.strip(" \u3000\t"):
        return Token(text, visible(characters), "space")
    if characters and not characters.strip():
        return Token(text, visible(characters), "newline")
    if characters.startswith(" "):
        return Token(text, visible(characters.removeprefix(" ")), "space")
    return Token(text, visible(characters), None)


def visible(text: str, longest: int = LONGEST) -> str:
    """A text, or its beginning, with nothing hidden: blanks, line ends and control characters are shown.

    >>> visible("a\\x00b\\u202ec d")
    'a␀b[202E]c d'
    >>> visible("  "), visible("\\n")
    ('␣␣', '↵')
    """
    blank = not text.strip()
    return "".join(
        c if c == " " and not blank else _SHOWN[c] if c in _SHOWN else _control(c) for c in cut(text, longest)
    )


def _control(c: str) -> str:
    code, kind = ord(c), unicodedata.category(c)
    if code < 32:
        return chr(0x2400 + code)
    if code == 127:
        return "␡"
    joins = code in (0x200C, 0x200D)  # parts of emoji and of words in several scripts
    return f"[{code:04X}]" if kind in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and not joins else c


def cut(text: str, longest: int = LONGEST) -> str:
    """A text, or its beginning.

    >>> cut("a long text", 7)
    'a long…'
    """
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _continues(before: Token, token: Token) -> bool:
    """Whether two tokens are parts of one word, in a script with spaces between words."""
    if before.mark in ("special", "unknown", "newline", "byte") or not before.shown or not token.shown:
        return False
    return all(c.isalnum() and unicodedata.category(c) != "Lo" for c in (before.shown[-1], token.shown[0]))


def _text(tokenizer: PreTrainedTokenizerBase, i: int) -> str:
    """What a tokenizer writes for an id."""
    for name in ("convert_ids_to_tokens", "id_to_token"):
        if hasattr(tokenizer, name):
            text: object = getattr(tokenizer, name)(i)
            if isinstance(text, bytes):
                return text.decode(errors="replace")
            return str(i) if text is None else str(text)
    return str(tokenizer.decode([i])) if hasattr(tokenizer, "decode") else str(i)


def _is_bytewise(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the characters of its tokens stand for bytes."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return "ByteLevel" in str(getattr(inner, "decoder", "")) or hasattr(tokenizer, "byte_decoder")


def _spaced(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it writes spaces as SentencePiece does, so that a token without one continues the last."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return _SPACE in str(getattr(inner, "decoder", "")) or hasattr(tokenizer, "sp_model")


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level tokenizers write for bytes: printable ones for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()
