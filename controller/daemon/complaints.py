"""Complaints about a configuration file: the key's path first, what is wrong, and a remedy last.

Words only: what is allowed is said by the sections in config.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import get_args, get_type_hints

from msgspec import Struct

from storage_backends.specs import BackendSpec, Spec


def explained(message: str, root: type[Struct]) -> str:
    """msgspec's complaint about a section with our path first and a remedy last."""
    what, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if unknown := re.match(r"Object contains unknown field `(.*)`", what):
        known = list(_keys_at(path, root))
        close = difflib.get_close_matches(unknown.group(1), known, n=1)
        remedy = f"did you mean `{close[0]}`?" if close else f"known keys here: {', '.join(known)}"
        return f"{joined(path, unknown.group(1))}: unknown key; {remedy}"
    if missing := re.match(r"Object missing required field `(.*)`", what):
        if missing.group(1) == "kind":
            return f"{joined(path, 'kind')}: missing; write one of: {', '.join(_kinds())}"
        return f"{joined(path, missing.group(1))}: missing; add it"
    if path.endswith("backend.kind"):
        return f"{path}: {what}; write one of: {', '.join(_kinds())}"
    return f"{path or 'the file'}: {what}; see deploy/hicache.yaml for what is allowed"


def joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _specs() -> tuple[type[Spec], ...]:
    alternatives: tuple[type[Spec], ...] = get_args(BackendSpec)
    return alternatives


def _kinds() -> list[str]:
    return [str(spec.__struct_config__.tag) for spec in _specs()]


def _keys_at(path: str, root: type[Struct]) -> Iterator[str]:
    """The keys that may stand at a path under a section."""
    if path.endswith("backend"):
        yield "kind"
        for spec in _specs():
            yield from spec.__struct_fields__
        return
    here: type[Struct] = root
    for key in filter(None, path.split(".")):
        hint = get_type_hints(here).get(key.partition("[")[0])
        hints = (hint, *get_args(hint))
        options = [one for one in hints if isinstance(one, type) and issubclass(one, Struct)]
        if not options:
            return
        here = options[0]
    yield from here.__struct_fields__
