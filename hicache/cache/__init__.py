"""UnifiedRadixCache: the engine's cache of L1, and its way to L2 and L3."""

from hicache.cache.cache import UnifiedRadixCache
from hicache.cache.costs import LoadRule
from hicache.cache.counters import Counters
from hicache.cache.lower import LowerTiers
from hicache.cache.requests import Request
from hicache.cache.writing import SwitchRefused, WritePolicy, WriteRules

__all__ = [
    "Counters",
    "LoadRule",
    "LowerTiers",
    "Request",
    "SwitchRefused",
    "UnifiedRadixCache",
    "WritePolicy",
    "WriteRules",
]
