"""The storage tier as the controller sees it: batches of keys and slab ranges in, outcomes out.

Owns deadlines, bytes in flight and the worker process that the backend runs in. Never looks into a
frame (the controller verifies what was read) and never decides what is worth storing.
"""

from controller.storage.stack import Member, StorageStack, TierPolicy
from controller.storage.tier import StorageLimits, StorageTier, Transfer

__all__ = ["Member", "StorageLimits", "StorageStack", "StorageTier", "TierPolicy", "Transfer"]
