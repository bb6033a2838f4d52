"""HiCache: keeps LLM attention state in L1, L2 and L3. This package is what an engine imports.

The names below are loaded when first used, so that `hicache.core` stays free of gRPC.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache.cache import LoadRule, Request, SwitchRefused, UnifiedRadixCache, WritePolicy, WriteRules
    from hicache.client import Client, PrefetchPolicy, RankPlace, SharedRegion
    from hicache.core.layout import ComponentSpec, Kind, Layout, LayoutError, Plane, Pool

__all__ = [
    "Client",
    "ComponentSpec",
    "Kind",
    "Layout",
    "LayoutError",
    "LoadRule",
    "Plane",
    "Pool",
    "PrefetchPolicy",
    "RankPlace",
    "Request",
    "SharedRegion",
    "SwitchRefused",
    "UnifiedRadixCache",
    "WritePolicy",
    "WriteRules",
]

_HOMES = {
    "hicache.cache": (
        "LoadRule",
        "Request",
        "SwitchRefused",
        "UnifiedRadixCache",
        "WritePolicy",
        "WriteRules",
    ),
    "hicache.client": ("Client", "PrefetchPolicy", "RankPlace", "SharedRegion"),
    "hicache.core.layout": ("ComponentSpec", "Kind", "Layout", "LayoutError", "Plane", "Pool"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
