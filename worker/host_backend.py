"""The host as a worker's backend."""

import torch

from copyengine import available
from copyengine.budget import Budget, Wanted, bank_nbytes
from copyengine.device.host import HostWorkerDevice
from copyengine.model_spec import ModelSpec
from copyengine.planning import Plan
from copyengine.protocol import Dtype
from worker.backend import PoolOrder, Rehearsal
from worker.host_experts import HostExperts
from worker.host_memory import HostMemory
from worker.host_slots import ExpertSlots
from worker.model.stack import Decoder


class HostBackend:
    """See Backend."""

    device = torch.device("cpu")
    name = "cpu"
    by_page_table = False

    def plan(self, spec: ModelSpec, dtype: Dtype, record_nbytes: int, wanted: Wanted) -> Budget:
        """See Backend.

        The banks may have been allocated long ago, for another worker. The plan counts them, so what is available here
        is counted with them.
        """
        available_nbytes = available.host_nbytes() + bank_nbytes(spec, record_nbytes)
        return Plan(spec, dtype, record_nbytes, available_nbytes).settled(wanted)

    def make_slots(self, order: PoolOrder) -> tuple[ExpertSlots, HostExperts]:
        """See Backend."""
        slots = ExpertSlots(
            HostWorkerDevice(),
            order.run_id,
            order.worker,
            order.geometry,
            order.wake,
            order.deadline_s,
            order.on_release,
            order.on_bytes,
            order.checks,
        )
        pool = torch.from_numpy(slots.pool_bytes)
        kind = (order.layout, order.geometry.experts, order.input_scales, order.fixed_order_of)
        return slots, HostExperts(slots, pool, *kind)

    def allocate_host(self, nbytes: int) -> HostMemory:
        """See Backend: memory like any other."""
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        return HostMemory(tensor, tensor.numpy())

    def synchronize(self) -> None:
        """See Backend: it is done when it returns."""

    def graphs(self, model: Decoder, max_running: int) -> None:
        """See Backend."""

    def rehearse(self, rehearsal: Rehearsal) -> None:
        """See Backend: there are none."""

    def close(self) -> None:
        """See Backend."""
