"""How the gRPC server listens and how it stops. Knows no verb and no controller."""

from __future__ import annotations

import time

import grpc

from controller.daemon.attachments import Attachments
from controller.daemon.config import Server


async def stop_serving(server: grpc.aio.Server, attachments: Attachments, grace_s: float) -> bool:
    """End the engines' streams, let what runs finish within the grace, cut the rest. An engine's stream
    never holds up the stop. False when some engine's transfers have not ended."""
    deadline_s = time.monotonic() + grace_s
    drained = await attachments.end_all(grace_s)
    await server.stop(max(0.0, deadline_s - time.monotonic()))
    return drained


def server_options(server: Server) -> list[tuple[str, int]]:
    """gRPC's channel arguments. Clients may ping as often as they like: none is cut off for it."""
    return [
        ("grpc.max_receive_message_length", server.max_message_bytes),
        ("grpc.max_send_message_length", server.max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
