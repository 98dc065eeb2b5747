"""KV pages: where keys and values of past tokens lie. Which sequence owns which page is the scheduler's business."""

from collections.abc import Sequence

import torch

from copyengine.model_spec import ModelSpec
from kernels.attention import store_kv
from worker.host_memory import Zeros


class KvLayer:
    """The pages of one attention layer."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        kv_shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
        zeros: Zeros | None = None,
    ) -> None:
        """`kv_shapes` are those of keys and of values, or what an attention keeps in their place, as its spec says.
        `zeros` makes the pages, if they are not to lie in the device's own memory."""
        make = zeros or (lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device))
        self.k, self.v = (make((num_pages, page_tokens, *shape), dtype) for shape in kv_shapes)

    def append(self, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, offsets: torch.Tensor) -> None:
        """Stores row i of k, v [T, kv_heads, D] in page `pages[i]` at place `offsets[i]` ([T] int64 each)."""
        store_kv(k, v, self.k, self.v, pages, offsets)


class KvCache:
    """The pages of all layers that leave something in them: page p of every layer belongs to the same tokens."""

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        zeros: Zeros | None = None,
    ) -> None:
        """`zeros` as for KvLayer."""
        if num_pages < 1 or page_tokens < 1:
            raise ValueError(f"num_pages ({num_pages}) and page_tokens ({page_tokens}) must be at least 1")
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.device = device
        self._of_layer = {
            index: KvLayer(num_pages, page_tokens, layer.attention.kv_shapes, dtype, device, zeros)
            for index, layer in enumerate(spec.layers)
            if layer.attention.kv_shapes
        }
        self.layers = list(self._of_layer.values())

    def of_layer(self, index: int) -> KvLayer:
        """Those of the model's layer `index`, which leaves something in them."""
        return self._of_layer[index]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)
