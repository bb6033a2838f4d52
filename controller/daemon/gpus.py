"""GPUs of the daemon: whether it uses any, as `transfers.engine` says and the machine allows.

Decides nothing else; `controller.transfers.cuda` does the work.
"""

from __future__ import annotations

import structlog

from controller.memory.cuda import CudaError
from controller.memory.pinning import HostMemory
from controller.transfers.copies import CopyEngine
from controller.transfers.cuda.devices import Devices, EngineChoice, cuda_calls

log = structlog.get_logger("hicache.gpus")


class GpuMissing(Exception):  # noqa: N818 - the name is what it is
    """The configuration asks for a GPU, and there is none; the message names the key and the remedy."""


def open_gpus(engine: str, host: HostMemory, cpu: CopyEngine) -> Devices | None:
    """The machine's GPUs, or None when none is to be used: `engine` is `cpu`, or `auto` where there is no
    driver or device (the log says why). Raises GpuMissing when one is asked for by name."""
    choice = EngineChoice(engine)
    if choice is EngineChoice.CPU:
        return None
    try:
        calls = cuda_calls()
    except CudaError as error:
        if choice is not EngineChoice.AUTO:
            raise GpuMissing(
                f"transfers.engine: {engine} needs a CUDA device ({error.strerror}); give the daemon one, or "
                "write auto"
            ) from error
        log.info("no_gpu", reason=error.strerror)
        return None
    log.info("gpus", n_devices=len(calls.memory.devices()), engine=engine)
    return Devices(calls, host, cpu, choice=choice, told=lambda line: log.info("gpu", note=line))
