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


def cuda_devices(driver: Driver | None = None) -> list[GpuFacts]:
    """The GPUs that this process sees; none without package, driver or GPU. ConfigError for one that is of no use.

    Takes a context on each for a moment, about 0.3 s.
    """
    try:
        driver = driver or load_driver()
    except ConfigError:
        return []
    return [_facts(driver, ordinal) for ordinal in range(driver.device_count())]


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
