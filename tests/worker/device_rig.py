# mypy: allow-untyped-calls
"""A worker's slots on a device with a real copy loop: on a GPU, or on host memory with Triton's interpreter."""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from copyengine.checksums import bank_sums
from copyengine.copier import Attachment, Copier
from copyengine.device import CLEARED, CopyDevice, OnBytes
from copyengine.device.host import HostCopyDevice, Segment, attach_segment, create_segment
from copyengine.protocol import MemoryHandle
from copyengine.ring import Limits, RingReader
from kernels.formats import RecordLayout
from kernels.grouped_gemm import InputScales
from worker.copy_checks import CopyChecks
from worker.device_slots import DeviceSlots
from worker.geometry import SlotGeometry
from worker.layer_rows import LayerRows
from worker.step_device import Allocation


class HostedMemory:
    """Shared memory where a GPU's would be."""

    def __init__(self, nbytes: int) -> None:
        self.segment = create_segment("test", "device", nbytes)
        self.address = self.segment.array.ctypes.data

    @property
    def handle(self) -> MemoryHandle:
        return self.segment.handle

    def close(self) -> None:
        self.segment.close()


@dataclass
class HostedRing:
    address: int

    def close(self) -> None:
        self.address = 0


class HostedDevice:
    """A device whose stream runs everything at once, so that a wait on it waits here."""

    has_stream_waits = True
    deadline_s = 30.0

    def allocate(self, nbytes: int, on_bytes: OnBytes | None = None) -> HostedMemory:
        return HostedMemory(nbytes)

    def map_ring(self, ring: Segment) -> HostedRing:
        return HostedRing(ring.array.ctypes.data)

    def wait_flag(self, stream: int, address: int) -> None:
        start = time.monotonic()
        while self.read_words(address, 1) == [CLEARED]:
            assert time.monotonic() - start < self.deadline_s, "nobody raised the flag"
            time.sleep(0)

    def write_words(self, address: int, value: int, count: int) -> None:
        words = (ctypes.c_uint32 * count).from_address(address)
        words[:] = [value] * count

    def read_words(self, address: int, count: int) -> list[int]:
        return list((ctypes.c_uint32 * count).from_address(address))


class HostedStream:
    """Everything that it was given is done."""

    def handle(self) -> int:
        return 0

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    def synchronize(self) -> None:
        pass


def hosted_tensor(memory: Allocation, nbytes: int) -> torch.Tensor:
    assert isinstance(memory, HostedMemory)
    return torch.from_numpy(memory.segment.array[:nbytes])


@dataclass
class Place:
    """What the rig runs on."""

    device: Any
    stream: Any
    tensor_of: Callable[[Allocation, int], torch.Tensor]
    copies: CopyDevice
    torch_device: torch.device
    close: Callable[[], None] = field(default=lambda: None)


def hosted(copies: CopyDevice | None = None) -> Place:
    return Place(HostedDevice(), HostedStream(), hosted_tensor, copies or HostCopyDevice(), torch.device("cpu"))


def on_gpu(make_copies: Callable[[], CopyDevice] | None = None) -> Place:
    """GPU 0, the copy engine in this process."""
    from copyengine.device.cuda import CudaCopyDevice
    from copyengine.device.cuda_worker import CudaWorkerDevice
    from worker.cuda_backend import ComputeStream, as_tensor

    device = CudaWorkerDevice(0, local=True)
    copies = make_copies() if make_copies else CudaCopyDevice(local=True)
    where = torch.device("cuda", 0)
    torch.cuda.set_stream(torch.cuda.Stream(where))

    def close() -> None:
        copies.close()
        device.close()

    return Place(device, ComputeStream(), as_tensor, copies, where, close)


class Rig:
    """Banks of given records, a copier, and the slots of one worker."""

    def __init__(
        self,
        place: Place,
        geometry: SlotGeometry,
        layout: RecordLayout,
        records: list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]],
        deadline_s: float = 30.0,
        input_scales: Sequence[InputScales] = (),
        verify: bool = False,
        fixed: bool = False,
    ) -> None:
        """`records[l]` is the bank of layer l, [E, record_nbytes] uint8. `verify`: as with --verify-copies; `fixed`: as
        with --deterministic."""
        self.input_scales = input_scales
        self.place = place
        self.geometry = geometry
        self.layout = layout
        self.released: list[str] = []
        self.copier = Copier(place.copies, background_depth=2, spin_us=500, on_death=lambda: None)
        self.slots = DeviceSlots(
            place.device,
            place.stream,
            place.tensor_of,
            "test",
            "w",
            geometry,
            layout,
            self.copier.wake,
            deadline_s,
            self.released.append,
            input_scales=input_scales,
            checks=CopyChecks(bank_sums(records, lambda _: None), geometry.record_nbytes) if verify else None,
            fixed=fixed,
        )
        self.banks = []
        for layer, bank in enumerate(records):
            memory = place.copies.allocate_bank("test", f"bank{layer}", bank.nbytes)
            memory.array[:] = bank.reshape(-1)
            self.banks.append(memory)
        self.slots.pool.fill_(0xFF)  # bytes that are not numbers
        pool = torch.from_numpy(np.concatenate(records)).to(place.torch_device)
        self._resident_pool = pool  # layer l's expert e in slot l * E + e
        self.copier.start()

    def attach(self) -> None:
        """Have the copier serve the slots."""
        request, geometry = self.slots.attach_request, self.geometry
        ring = attach_segment(request.ring)
        limits = Limits(geometry.layers, geometry.experts, request.pool_slots, request.flags.nbytes // 4)
        attachment = Attachment(
            request.worker,
            self.banks,
            geometry.record_nbytes,
            self.place.copies.open(request.pool),
            self.place.copies.open(request.flags),
            ring,
            RingReader(ring.array, limits),
        )
        self.copier.attach(attachment).result(10)

    def expected(self, layer: int, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The layer with every expert resident: the same GEMM over a pool that nobody copies into."""
        scales = self.input_scales[layer] if self.input_scales else None
        rows = LayerRows(self.layout, self.geometry.experts, x, weights, experts, scales)
        first = layer * self.geometry.experts
        slot_of = torch.arange(first, first + self.geometry.experts, dtype=torch.int32, device=x.device)
        span = torch.tensor([0, self.geometry.experts], dtype=torch.int32, device=x.device)
        rows.compute(self._resident_pool, slot_of, span, self.geometry.experts)
        return rows.combined()

    def residents(self) -> set[tuple[int, int]]:
        """(layer, expert) of all cache slots; each must really be there, byte for byte."""
        held = set()
        for slot, owner in enumerate(self.slots.tables.owner.tolist()):
            if owner >= 0:
                assert torch.equal(self.slots.pool[slot], self._resident_pool[owner]), f"slot {slot} lacks its record"
                held.add(divmod(owner, self.geometry.experts))
        return held

    def close(self) -> None:
        assert self.copier.stop()
        assert self.slots.close()
        for bank in self.banks:
            bank.close()


@contextmanager
def rig_on(place: Place, *arguments: Any, **more: Any) -> Iterator[Rig]:
    """A rig whose slots are served."""
    rig = Rig(place, *arguments, **more)
    try:
        rig.attach()
        yield rig
    finally:
        rig.close()
