# mypy: allow-untyped-calls
"""What a worker on a GPU is made of."""

from collections.abc import Callable

import psutil
import torch

from copyengine.budget import Budget, Wanted
from copyengine.device.cuda_worker import CudaWorkerDevice
from copyengine.model_spec import ModelSpec
from copyengine.planning import FreeGpu, Plan
from copyengine.protocol import Dtype
from worker.backend import PoolOrder, Rehearsal
from worker.decode_graphs import DecodeGraphs
from worker.device_slots import DeviceSlots
from worker.model.stack import Decoder
from worker.rehearsal import rehearse
from worker.step_device import Allocation


class ComputeStream:
    """torch's current stream, which while a graph is captured is another one: see worker.step_device.StepStream."""

    def handle(self) -> int:
        """See worker.step_device.StepStream."""
        return torch.cuda.current_stream().cuda_stream

    def mark(self) -> Callable[[], bool] | None:
        """See worker.step_device.StepStream."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event()
        event.record()
        return event.query

    def synchronize(self) -> None:
        """See worker.step_device.StepStream."""
        torch.cuda.current_stream().synchronize()


class CudaBackend:
    """See worker.backend.Backend. Made on the compute thread, whose current stream and device it sets."""

    by_page_table = True

    def __init__(self, ordinal: int, local: bool) -> None:
        """GPU number `ordinal`; `local` if the copy engine is a thread of this process. ConfigError if it is no use."""
        self.device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(torch.cuda.Stream(self.device))
        self.name = f"cuda:{ordinal} {torch.cuda.get_device_name(self.device)}"
        self._driver = CudaWorkerDevice(ordinal, local)

    def plan(self, spec: ModelSpec, dtype: Dtype, record_nbytes: int, wanted: Wanted) -> Budget:
        """See worker.backend.Backend."""
        free_nbytes, _ = torch.cuda.mem_get_info(self.device)
        gpus, host_nbytes = (FreeGpu(self.name, free_nbytes),), psutil.virtual_memory().available
        return Plan(spec, dtype, record_nbytes, host_nbytes, gpus, started=True).settled(wanted)

    def make_slots(self, order: PoolOrder) -> tuple[DeviceSlots, DeviceSlots]:
        """See worker.backend.Backend: the slots compute what comes through them."""
        slots = DeviceSlots(
            self._driver,
            ComputeStream(),
            as_tensor,
            order.run_id,
            order.worker,
            order.geometry,
            order.layout,
            order.wake,
            order.deadline_s,
            order.on_release,
            order.on_bytes,
        )
        return slots, slots

    def synchronize(self) -> None:
        """See worker.backend.Backend."""
        torch.cuda.synchronize(self.device)

    def graphs(self, model: Decoder, max_running: int) -> DecodeGraphs:
        """See worker.backend.Backend."""
        return DecodeGraphs(model, self.device, max_running)

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """See worker.backend.Backend."""
        rehearse(rehearsal)

    def close(self) -> None:
        """Give the device back."""
        self._driver.close()


class _Interface:
    """Device memory as other libraries take it over: CUDA Array Interface, version 3."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def as_tensor(memory: Allocation, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 at the memory's address. It must not be used after the memory is closed."""
    return torch.as_tensor(_Interface(memory.address, nbytes), device="cuda")
