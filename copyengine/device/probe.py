"""Which GPUs are here, what is free on them, and whether processes can share their memory."""

from contextlib import ExitStack

from msgspec import Struct

from copyengine.device.cuda_driver import CudaError, Driver, load_driver
from copyengine.device.cuda_gpu import Gpu
from copyengine.device.cuda_worker import BLOCK_NBYTES
from copyengine.wire.errors import ConfigError


class GpuFacts(Struct, frozen=True):
    """One GPU. `ipc`: its memory can be exported to other processes."""

    ordinal: int
    name: str
    link: str  # PCI bus id
    total_nbytes: int
    free_nbytes: int
    ipc: bool
    capability: tuple[int, int]


class Found(Struct, frozen=True):
    """The GPUs that give a context, and for each other one why it cannot be used."""

    gpus: list[GpuFacts]
    refused: list[str]


def find_gpus(driver: Driver | None = None) -> Found:
    """What this process sees; nothing without package, driver or GPU.

    Takes a context on each GPU for a moment, about 0.3 s. One that is full, broken or another process's alone refuses
    it, and does not keep the others from use.
    """
    found = Found([], [])
    try:
        driver = driver or load_driver()
    except ConfigError:
        return found
    for ordinal in range(driver.device_count()):
        try:
            found.gpus.append(_facts(driver, ordinal))
        except ConfigError as error:
            found.refused.append(str(error))
        except CudaError as error:
            found.refused.append(f"GPU {ordinal} cannot be used: {error}")
    return found


def cuda_devices(driver: Driver | None = None) -> list[GpuFacts]:
    """The GPUs of `find_gpus`."""
    return find_gpus(driver).gpus


def _facts(driver: Driver, ordinal: int) -> GpuFacts:
    device = driver.device(ordinal)
    capability = tuple(driver.attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    with ExitStack() as undo:
        gpu = Gpu(driver, device)
        undo.callback(gpu.close)
        gpu.enter()
        free, total = driver.memory()
        return GpuFacts(ordinal, driver.name(device), gpu.link, total, free, _exports(driver), capability)  # type: ignore[arg-type]


def _exports(driver: Driver) -> bool:
    try:
        address = driver.allocate(BLOCK_NBYTES)
    except CudaError:
        return False
    try:
        driver.export(address)
    except CudaError:
        return False
    finally:
        driver.free(address)
    return True
