"""Dense weights of a checkpoint as torch tensors on the worker's device."""

from collections.abc import Callable

import numpy as np
import torch

from copyengine.checkpoint.model import Model
from copyengine.checkpoint.reader import read_dense
from copyengine.checkpoint.tied_head import warn_of_another_head
from copyengine.protocol import Dtype
from worker.host_memory import Allocate, copy_in

TORCH_DTYPES: dict[Dtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def load_dense(
    model: Model,
    dtype: Dtype,
    device: torch.device,
    on_bytes: Callable[[int], None],
    embedding_in: Allocate | None = None,
) -> dict[str, torch.Tensor]:
    """All weights outside the experts, by canonical name, converted to `dtype`; `on_bytes` hears of bytes read.

    The token embedding lies in memory of `embedding_in`, if that is given. Raises ConfigError if a file does not hold
    what its header says.
    """
    warn_of_another_head(model)
    weights: dict[str, torch.Tensor] = {}
    for name, array in read_dense(model, dtype, on_bytes):
        if name == "embed" and embedding_in is not None:
            weights[name] = copy_in(embedding_in, to_tensor(array, torch.device("cpu")))
        else:
            weights[name] = to_tensor(array, device)
    return weights


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `array` in memory of torch's own.

    A copy, because numpy aligns to 16 bytes only and MKL's float32 results depend on an operand's alignment: a start
    of the engine must not differ from the next one in its last bits.
    """
    if array.dtype.name == "bfloat16":  # which torch does not know as a numpy type
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.tensor(array).to(device)
