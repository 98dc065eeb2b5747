"""What the memories of a machine must hold, beside what they have: pure, no I/O. What does not fit is refused here."""

import math

from msgspec import Struct

from copyengine.budget import (
    BANKS,
    HOST_RESERVE_NBYTES,
    Budget,
    Part,
    Wanted,
    bank_nbytes,
    gpu_reserve_nbytes,
    total_nbytes,
)
from copyengine.model_spec import ModelSpec
from copyengine.reckoning import reckon, reckon_gpu
from copyengine.remedy import remedy
from copyengine.wire.errors import ConfigError


class Need(Struct, frozen=True):
    """What one memory must hold, and how much of it is free."""

    place: str  # such as "host memory"
    parts: tuple[Part, ...]
    available_nbytes: int

    @property
    def total_nbytes(self) -> int:
        """Of all parts."""
        return total_nbytes(self.parts)

    @property
    def short_nbytes(self) -> int:
        """What is missing; 0 or less if it fits."""
        return self.total_nbytes - self.available_nbytes


class Survey(Struct, frozen=True):
    """What each worker would allocate, and what all of that takes of which memory, fitting or not."""

    budget: Budget
    needs: tuple[Need, ...]

    @property
    def short_nbytes(self) -> int:
        """What is missing where most is."""
        return max(need.short_nbytes for need in self.needs)


class FreeGpu(Struct, frozen=True):
    """A GPU that a worker has."""

    name: str
    free_nbytes: int


class Plan(Struct, frozen=True):
    """A model and the memory that is free for it: says what a Wanted takes of that."""

    spec: ModelSpec
    dtype: str
    record_nbytes: int  # of an expert; 0 for a dense model
    host_nbytes: int  # that are free
    gpus: tuple[FreeGpu, ...] = ()  # worker i's is gpus[i]; none on the host
    started: bool = False  # on a GPU: contexts, processes and banks have their memory already, not in what is free

    def settled(self, wanted: Wanted) -> Budget:
        """What each worker allocates. ConfigError, naming what is needed, what is there and the fix, if it is too much;
        for settings that no memory would make right too."""
        survey = self.survey(wanted)
        refusal = self.refusal(survey, wanted)
        if refusal:
            raise ConfigError(refusal)
        return survey.budget

    def survey(self, wanted: Wanted) -> Survey:
        """What `wanted` takes, fitting or not. ConfigError for settings that no memory would make right."""
        return self._survey_gpus(wanted) if self.gpus else self._survey_host(wanted)

    def refusal(self, survey: Survey, wanted: Wanted) -> str:
        """Why what `wanted` takes, which is `survey`, cannot be had, and what to change; "" if it fits."""
        if survey.short_nbytes <= 0:
            return ""
        need = max(survey.needs, key=lambda need: need.short_nbytes)
        listed = ", ".join(f"{part.name} {mb(part.nbytes)}" for part in need.parts)
        fix = remedy(self.spec, self.dtype, wanted, survey.budget, lambda changed: self.survey(changed).short_nbytes)
        return (
            f"{need.place}: {mb(need.total_nbytes)} needed ({listed}), {mb(need.available_nbytes)} available; "
            f"{fix}, or free {mb(need.short_nbytes)}"
        )

    def _survey_host(self, wanted: Wanted) -> Survey:
        """The banks are there once, everything else once per worker."""
        banks = bank_nbytes(self.spec, self.record_nbytes)
        share_nbytes = banks + max(0, self.host_nbytes - banks) // wanted.workers
        budget = reckon(self.spec, self.dtype, self.record_nbytes, share_nbytes, wanted)
        parts = tuple(part if part.name == BANKS else _times(wanted.workers, part) for part in budget.parts)
        return Survey(budget, (Need("host memory", parts, self.host_nbytes),))

    def _survey_gpus(self, wanted: Wanted) -> Survey:
        """All workers get the same sizes, which the GPU with the least free memory decides."""
        gpus, workers = self.gpus[: wanted.workers], wanted.workers
        reserve = gpu_reserve_nbytes(wanted.vram_reserve_nbytes, self.started)
        banks = Part(f"pinned {BANKS}", 0 if self.started else bank_nbytes(self.spec, self.record_nbytes))
        to_stay = Part("to stay free", HOST_RESERVE_NBYTES * (1 if self.started else 1 + workers))
        budget = reckon_gpu(
            self.spec,
            self.dtype,
            self.record_nbytes,
            min(gpu.free_nbytes for gpu in gpus),
            wanted,
            reserve,
            max(0, self.host_nbytes - banks.nbytes - to_stay.nbytes) // workers,
        )
        own = [_times(workers, Part(f"pinned {part.name}", part.nbytes)) for part in budget.pinned]
        pinned = [part for part in (banks, *own) if part.nbytes]
        host = Need("host memory", (*pinned, to_stay) if pinned else (), self.host_nbytes)
        return Survey(budget, (host, *(Need(f"memory of {gpu.name}", budget.parts, gpu.free_nbytes) for gpu in gpus)))


def _times(workers: int, part: Part) -> Part:
    """What all workers take together."""
    return Part(f"{workers} x {part.name}", workers * part.nbytes) if workers > 1 else part


def mb(nbytes: int) -> str:
    """Rounded up, so that a shortage never reads as 0."""
    return f"{math.ceil(nbytes / 10**6):,} MB"
