"""Makes one shard of a checkpoint whose experts are quantised from another one's."""

import os
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from copyengine.checkpoint.checks import DTYPES
from copyengine.checkpoint.convert import NUMPY_DTYPE
from copyengine.checkpoint.encode import encode, squared_error
from copyengine.checkpoint.files import Files
from copyengine.checkpoint.nvfp4 import global_of
from copyengine.checkpoint.parallel import run_all
from copyengine.checkpoint.quantise_plan import Copied, Linear, Quantised, Shard
from copyengine.checkpoint.reader import OnBytes, as_bytes
from copyengine.checkpoint.schemes import Scheme
from copyengine.checkpoint.shard_file import ShardFile
from copyengine.wire.errors import ConfigError

COPY_NBYTES = 32 << 20
"""Of a tensor that stays as it is, read at a time."""

JOBS_PER_THREAD = 8
"""In one go: how much an interruption waits for."""

Errors = dict[int, tuple[float, float]]
"""By layer, sums over its experts: of the squared error, and of the squared weights."""


def make_shard(target: Path, shard: Shard, scheme: Scheme, on_bytes: OnBytes) -> Errors:
    """Make the file of `shard` in `target`, which is there only once it is complete; the errors of its experts.

    `on_bytes` hears of the bytes read, from several threads. ConfigError for a weight that is not finite and for a
    source that cannot be read, OSError if the file cannot be written.
    """
    threads = os.cpu_count() or 1
    errors: Errors = {}
    with ShardFile(target / shard.name, shard.outputs) as file:
        for first in range(0, len(shard.jobs), threads * JOBS_PER_THREAD):
            jobs = shard.jobs[first : first + threads * JOBS_PER_THREAD]
            work = [
                partial(_copy, job, file, on_bytes)
                if isinstance(job, Copied)
                else partial(_quantise, job, scheme, file, on_bytes)
                for job in jobs
            ]
            for job, (error, squares) in zip(jobs, run_all(work, threads, "quantiser"), strict=True):
                if isinstance(job, Quantised):
                    add_errors(errors, {job.layer: (error, squares)})
    return errors


def add_errors(total: Errors, more: Errors) -> None:
    """Add the sums of `more` to those in `total`."""
    for layer, (error, squares) in more.items():
        before = total.get(layer, (0.0, 0.0))
        total[layer] = (before[0] + error, before[1] + squares)


def _copy(job: Copied, file: ShardFile, on_bytes: OnBytes) -> tuple[float, float]:
    with Files() as files:
        for start in range(0, job.ref.nbytes, COPY_NBYTES):
            piece = np.empty(min(COPY_NBYTES, job.ref.nbytes - start), np.uint8)
            files.read_into(job.ref.path, job.ref.offset + start, piece.data)
            file.write(job.output.name, piece.data, start)
            on_bytes(piece.nbytes)
    return 0.0, 0.0


def _quantise(job: Quantised, scheme: Scheme, file: ShardFile, on_bytes: OnBytes) -> tuple[float, float]:
    """The sum of what encode.squared_error says of its linears. ConfigError for a weight that is not finite."""
    weights = [_weight(linear) for linear in job.linears]
    error = squares = 0.0
    for linear, weight, tensors in zip(job.linears, weights, encode(scheme, weights), strict=True):
        for made in linear.made:
            file.write(made.output.name, tensors[made.kind].tobytes(), made.start)
        on_bytes(linear.ref.nbytes)
        more = squared_error(weight, tensors, scheme)
        error, squares = error + more[0], squares + more[1]
    return error, squares


def _weight(linear: Linear) -> NDArray[np.generic]:
    """[N, K]. ConfigError if an element is not finite."""
    weight = np.empty(linear.ref.shape, NUMPY_DTYPE[DTYPES[linear.ref.dtype]])
    with Files() as files:
        files.read_into(linear.ref.path, linear.ref.offset, as_bytes(weight))
    if not np.isfinite(global_of(weight)):
        raise ConfigError(f"{linear.ref.path}: tensor {linear.source} holds values that are not finite")
    return np.ascontiguousarray(weight.T) if linear.transposed else weight
