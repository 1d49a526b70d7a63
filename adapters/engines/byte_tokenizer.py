"""A tokenizer that needs no vocabulary: one token a byte of UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

_MARK = {"tokenizer_class": "SynclineByteTokenizer"}
_FILE = "tokenizer_config.json"


class Tokenizer(Protocol):
    """What a server asks of a tokenizer: those of transformers fit."""

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class ByteTokenizer:
    """Tokens 0 to 255 are bytes; 256 ends a text, 257 pads. Models need a vocabulary of `vocab_size`."""

    vocab_size = 258
    eos_token_id = 256
    pad_token_id = 257

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text`` in UTF-8; no end token is added."""
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Sequence[int] | Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the byte tokens; what is no UTF-8 becomes U+FFFD. Other tokens are left out, or named."""
        parts: list[str] = []
        run = bytearray()
        for token in [*token_ids, None]:
            if token is not None and 0 <= token < 256:
                run.append(token)
                continue
            parts.append(run.decode("utf-8", errors="replace"))
            run.clear()
            if token is not None and not skip_special_tokens:
                parts.append({self.eos_token_id: "<eos>", self.pad_token_id: "<pad>"}.get(token, f"<{token}>"))
        return "".join(parts)

    def save(self, folder: str | Path) -> None:
        """Mark a checkpoint folder as using this tokenizer."""
        (Path(folder) / _FILE).write_text(json.dumps(_MARK), encoding="utf-8")

    @staticmethod
    def is_marked(folder: str | Path) -> bool:
        """Does this checkpoint folder use this tokenizer?"""
        path = Path(folder) / _FILE
        if not path.is_file():
            return False
        found = json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class")
        return bool(found == _MARK["tokenizer_class"])


class TextStream:
    """Text of tokens that come one by one. Holds back what the next token may still change."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._given = 0

    def add(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        before, now = self._text(self._given), self._text(len(self._ids))
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return now[len(before) :]

    def end(self) -> str:
        """What was held back."""
        return self._text(len(self._ids))[len(self._text(self._given)) :]

    def _text(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True)
