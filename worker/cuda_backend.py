# mypy: allow-untyped-calls
"""What a worker on a GPU is made of."""

from collections.abc import Callable

import torch

from copyengine import available
from copyengine.budget import Budget, Wanted
from copyengine.device.cuda_worker import CudaWorkerDevice, MappedHostMemory
from copyengine.model_spec import ModelSpec
from copyengine.planning import FreeGpu, Plan
from copyengine.protocol import Dtype
from worker.backend import PoolOrder, Rehearsal
from worker.decode_graphs import DecodeGraphs
from worker.device_slots import DeviceSlots
from worker.host_memory import HostMemory
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
        self._mapped: list[MappedHostMemory] = []

    def plan(self, spec: ModelSpec, dtype: Dtype, record_nbytes: int, wanted: Wanted) -> Budget:
        """See worker.backend.Backend."""
        free_nbytes, _ = torch.cuda.mem_get_info(self.device)
        gpus, host_nbytes = (FreeGpu(self.name, free_nbytes),), available.host_nbytes()
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
            order.input_scales,
            order.checks,
            order.fixed_order_of is not None,
        )
        return slots, slots

    def allocate_host(self, nbytes: int) -> HostMemory:
        """See worker.backend.Backend."""
        memory = self._driver.allocate_host(nbytes)
        self._mapped.append(memory)
        return HostMemory(as_tensor(memory, nbytes), memory.array)

    def synchronize(self) -> None:
        """See worker.backend.Backend."""
        torch.cuda.synchronize(self.device)

    def graphs(self, model: Decoder, max_running: int) -> DecodeGraphs:
        """See worker.backend.Backend."""
        return DecodeGraphs(model, self.device, max_running)

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """See worker.backend.Backend."""
        torch.cuda.empty_cache()  # of weights that were put together when the model was built
        rehearse(rehearsal)

    def close(self) -> None:
        """Give the device back, and the host memory that it has mapped."""
        for memory in self._mapped:
            memory.close()
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


def as_tensor(memory: Allocation | MappedHostMemory, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 at the memory's address. It must not be used after the memory is closed."""
    tensor = torch.as_tensor(_Interface(memory.address, nbytes), device="cuda")
    assert tensor.data_ptr() == memory.address, "torch has copied it"
    return tensor
