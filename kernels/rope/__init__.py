"""Rotary position embedding, NEOX style: the first half of a head is rotated against the second."""

import torch

from kernels.rope import ref


def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    zero_centred: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each head of q and k as `rms_norm` leaves it (where there is a weight), then turned.

    Each pair (x[i], x[i + R/2]) of a head's first R elements is rotated by its angle, in float32; those beyond R stay.

    `q` is [T, heads, D] and `k` [T, kv_heads, D], both views of what they are part of if need be; `q_weight` and
    `k_weight` are [D] like them, or None; `cos` and `sin` [T, R/2] float32, R at most D. Returns new q and
    k, contiguous. On a CUDA device it is one launch. ValueError for shapes or types that do not fit together.
    """
    _expect_tables(q, cos, sin)
    _expect_tables(k, cos, sin)
    if q.dtype != k.dtype:
        raise ValueError(f"q and k must be of one type, not {q.dtype} and {k.dtype}")
    for weight in (q_weight, k_weight):
        if weight is not None and (tuple(weight.shape) != (q.shape[2],) or weight.dtype != q.dtype):
            raise ValueError(f"a weight must be {q.dtype} [{q.shape[2]}], not {weight.dtype} {list(weight.shape)}")
    if not q.is_cuda:
        return ref.norm_rope(q, k, q_weight, k_weight, eps, cos, sin, zero_centred)
    from kernels.rope import tri

    return tri.norm_rope(q, k, q_weight, k_weight, eps, cos, sin, zero_centred)


def _expect_tables(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if x.ndim != 3 or cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] != x.shape[0]:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit x {tuple(x.shape)}")
    if not 0 < 2 * cos.shape[1] <= x.shape[2] or x.shape[2] % 2:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit x {tuple(x.shape)}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(f"cos and sin must be float32, not {cos.dtype} and {sin.dtype}")
