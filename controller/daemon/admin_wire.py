"""Operators' requests in our own types: like `wire`, for what the Admin service is asked.

Parses once, strictly; bad input raises InvalidRequest naming the field. Asks nobody.
"""

from __future__ import annotations

import math

from controller.daemon.config import ConfigError, TierEntry, parse_tier
from controller.daemon.wire import checked_name
from controller.requests import InvalidRequest, Retain, Status
from hicache.core.words import token_array
from proto.v1 import hicache_pb2 as pb

MOST_S = 3600.0
MOST_KEEP_S = 7 * 86400.0


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


def retain(message: pb.PinPrefixRequest) -> Retain:
    if bool(message.engine_id) == bool(message.model):
        raise InvalidRequest("engine_id: give an attached engine's id, or the model and its revision")
    if not 0 <= message.host_share <= 1:
        raise InvalidRequest(f"host_share: {message.host_share}; give a part of host memory, 0 to 1")
    try:
        tokens = token_array(message.tokens)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    return Retain(
        tokens=tokens,
        keep_s=seconds(message.keep_s, "keep_s", default_s=600.0, most_s=MOST_KEEP_S),
        host_share=message.host_share,
        engine_id=checked_name(message.engine_id, "engine_id"),
        model=checked_name(message.model, "model"),
        revision=checked_name(message.revision, "revision"),
        adapter=checked_name(message.adapter, "adapter"),
        salt=checked_name(message.salt, "salt"),
    )


def seconds(value: float, field: str, *, default_s: float, most_s: float = MOST_S) -> float:
    """A time; 0 for the default."""
    if not math.isfinite(value) or not 0 <= value <= most_s:
        raise InvalidRequest(f"{field}: {value}; give seconds up to {most_s:.0f}, 0 for {default_s:.0f}")
    return value or default_s


def running(status: Status) -> list[str]:
    """What has begun and is not over."""
    counts = {
        "transfers of engines": sum(engine.jobs for engine in status.engines),
        "prefetches": status.running_prefetches,
        "pages on their way in": sum(pool.inbound_pages for pool in status.pools),
        "paths to be written to storage": sum(one.queued_writes for one in status.backends if one.healthy),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]
