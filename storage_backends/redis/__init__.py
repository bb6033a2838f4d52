"""The Redis backend: Redis or Valkey, single, behind Sentinel, as a Cluster, or started by us.

Speaks the Redis protocol itself, because that is how frames go straight between the host slab and the
socket. Knows nothing of what a frame is, and never retries past the deadline of one call.
"""
