"""Text for the demo: sources of the Python standard library, and a small deterministic word-piece tokeniser.

Decides which files are read and how text becomes ids. Downloads nothing, keeps nothing.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from hicache.core.words import TokenArray

_PIECE = re.compile(r"[A-Za-z]+|_+|\d|\n[ ]*|[ ]+|[^\sA-Za-z_\d]|\s")
_BYTES = 256


@dataclass(frozen=True)
class SourceFile:
    """One file of the standard library."""

    name: str
    text: str


def library_files(count: int, *, at_least_bytes: int) -> list[SourceFile]:
    """The first `count` modules of the standard library, by name, that are large enough.

    Raises FileNotFoundError when this Python comes without that many sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    large = (path for path in sorted(root.glob("[a-z]*.py")) if path.stat().st_size >= at_least_bytes)
    files = [SourceFile(path.name, path.read_text("utf-8")) for path in islice(large, count)]
    if len(files) < count:
        raise FileNotFoundError(f"{root}: only {len(files)} sources of {at_least_bytes} bytes, need {count}")
    return files


class Tokeniser:
    """Ids for the most frequent pieces (words, digits, spaces, signs) of a text; other pieces in bytes."""

    def __init__(self, texts: Iterable[str], vocabulary: int) -> None:
        counts = Counter(piece for text in texts for piece in _PIECE.findall(text))
        common = sorted(counts, key=lambda piece: (-counts[piece], piece))[: vocabulary - _BYTES]
        self._pieces = common
        self._ids = {piece: _BYTES + i for i, piece in enumerate(common)}

    def encode(self, text: str) -> TokenArray:
        """Ids of the text; `decode` gives it back."""
        ids: list[int] = []
        for piece in _PIECE.findall(text):
            known = self._ids.get(piece)
            ids.extend(piece.encode() if known is None else (known,))
        return np.array(ids, dtype=np.int32)

    def decode(self, tokens: TokenArray) -> str:
        """The text that the ids stand for; bytes that are no text are replaced."""
        parts = (
            self._pieces[token - _BYTES].encode() if token >= _BYTES else bytes([token])
            for token in tokens.tolist()
        )
        return b"".join(parts).decode("utf-8", "replace")
