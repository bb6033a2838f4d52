"""Operators' requests in our own types: like `wire`, for what the Admin service is asked.

Parses once, strictly; bad input raises InvalidRequest naming the field. Asks nobody.
"""

from __future__ import annotations

import math

from controller.daemon.config import ConfigError, TierEntry, parse_tier
from controller.requests import InvalidRequest
from proto.v1 import hicache_pb2 as pb

MOST_S = 3600.0


def tier_entry(message: pb.AttachStorageRequest) -> TierEntry:
    """A storage tier, checked by the schema of the configuration file."""
    if not message.backend:
        raise InvalidRequest("backend: empty; give what stands under `backend:` in the file, as YAML or JSON")
    try:
        return parse_tier(
            message.name,
            message.backend,
            read=message.read if message.HasField("read") else True,
            write=message.write if message.HasField("write") else True,
            required=message.required if message.HasField("required") else True,
        )
    except ConfigError as error:
        raise InvalidRequest(str(error)) from error


def seconds(value: float, field: str, *, default_s: float) -> float:
    """A time to wait; 0 for the default."""
    if not math.isfinite(value) or not 0 <= value <= MOST_S:
        raise InvalidRequest(f"{field}: {value}; give seconds up to {MOST_S:.0f}, 0 for {default_s:.0f}")
    return value or default_s
