"""Process-wide settings that decide the speed of a data path in Python. Each was measured; none changes
what the daemon does.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_COPY_TUNABLES = {
    "glibc.cpu.x86_non_temporal_threshold": "65536",
    "glibc.cpu.x86_rep_movsb_threshold": "1048576",
}
SWITCH_INTERVAL_S = 0.0005


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks up to 32 MiB: a fresh page of memory costs more than copying it.
    Halves the time of a gRPC message of some hundred KiB. Does nothing where libc has no mallopt."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def switch_threads_sooner() -> None:
    """A busy Python thread holds up the event loop for at most half a millisecond, not five."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def restart_with_fast_copies() -> None:
    """Start this very command line anew, in place, with glibc told to move pages of 64 KiB and more past
    the caches: about twice the speed. glibc reads that only at a process's start. Returns when there is
    nothing to do; a value that the operator set stays."""
    present = [one for one in os.environ.get("GLIBC_TUNABLES", "").split(":") if one]
    names = {one.partition("=")[0] for one in present}
    missing = [f"{name}={value}" for name, value in _COPY_TUNABLES.items() if name not in names]
    if missing:
        os.environ["GLIBC_TUNABLES"] = ":".join(present + missing)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
