"""One GPU as this process uses it: its primary context, which it shares with every other user in the process."""

from typing import Any

from copyengine.device.cuda_driver import CudaError, Driver
from copyengine.wire.errors import ConfigError


class Gpu:
    """Holds the primary context until `close`. `link` is its PCI bus id, which means the same to every process."""

    def __init__(self, driver: Driver, device: Any) -> None:
        """ConfigError if the GPU has no room for a context, or allows none."""
        self.driver = driver
        self.device = device
        self.link = driver.bus_id(device)
        self.has_stream_operations = driver.has_stream_operations(device)
        try:
            self._context = driver.retain_context(device)
        except CudaError as error:
            raise ConfigError(
                f"GPU {self.link} cannot be used: {error}; a process takes about 0.5 GB of a GPU for itself: "
                "free some, or see what holds the GPU with nvidia-smi"
            ) from None

    def enter(self) -> None:
        """Make its context the calling thread's."""
        self.driver.enter(self._context)

    def close(self) -> None:
        """Give up the context. What was allocated in it must be freed before, unless it has other users."""
        self.driver.release_context(self.device)


def check_ordinal(driver: Driver, ordinal: int) -> None:
    """ConfigError, naming the settings of copy engine and worker, if there is no GPU number `ordinal`."""
    count = driver.device_count()
    if ordinal >= count:
        raise ConfigError(f"--device cuda --ordinal {ordinal}: the number of GPUs here is {count}, the first is 0")
