"""Dense weights that are made up, with routers skewed as those of trained models are (--load-format dummy).

Every tensor is normal with a standard deviation of 1/sqrt(fan-in), so that activations keep their size, but for what
makes the routing. Residual coordinate CONSTANT holds the same value for every token: the embedding writes it, no layer
does. A router reads an expert's popularity from it, and the token's own preference, normal noise, from all others:

    logit[t, e] = quantile(popularity[e]) + noise[t, e],    popularity[e] = P(token t goes to expert e)

which is so because the K-th largest of E logits hardly differs from token to token, so that an expert is chosen when
its noise passes a fixed threshold. Layers have the same popularities in different orders.
"""

import math
from collections.abc import Callable

import torch

from copyengine.checkpoint.dummy import CONSTANT
from copyengine.checkpoint.tensors import dense_tensors, stays_float32
from copyengine.model_spec import ModelSpec, MoeSpec
from copyengine.protocol import Dtype
from worker.host_memory import Allocate, zeros_in
from worker.weights import TORCH_DTYPES

SEED = 20261129

ZIPF_EXPONENT = 1.3
ZIPF_OFFSET = 0.003
EVEN_SHARE = 0.05
TOP_POPULARITY = 0.95
"""Popularity of the expert of rank r (of E): EVEN_SHARE of all routes go to all experts alike, the rest as
((r + 1/2) / E + ZIPF_OFFSET) ** -ZIPF_EXPONENT, and nobody gets more than TOP_POPULARITY of the tokens.

Fitted to the share of a layer's 512 experts that T prompt tokens of K = 10 want, taken as the ratio of the times to the
first token on demand and streamed that were reported for Qwen3.8-Flash-Next (NVFP4) on an RTX 3090 Ti, PCIe 4:
0.44 / 0.51 / 0.56 / 0.65 / 0.79 / 0.97 / 1 at T = 87 / 117 / 151 / 230 / 387 / 718 / 1,324. The fit is off by 0.035 at
most. A token then shares a third of its experts with the one before it; 18-47 % were reported of trained models."""

ALWAYS = 0.9999
"""Popularity of an expert that every token goes to: the quantile of 1 is infinite."""

EMBEDDING_SCALE = 4.0
"""Standard deviation of the embedding. 48 layers then add less than a quarter to the size of the residual, so that an
error in LAYER_VARIANCE does not change the routing; the next token depends on the context all the same."""

LAYER_VARIANCE = 0.15
"""What a layer adds to the variance of a residual coordinate: ten experts 0.08, attention the rest, which is less the
longer the context is (48 layers of H 256, 87 to 1,324 tokens: the constant, meant to be 1 in the last layer, was 0.95
to 1.01)."""

ATTENTION_SHARPNESS = 3.0
"""Standard deviation of attention's logits where queries and keys are normed: few positions get most of the weight."""

WRITE_SCALE = 0.5
"""What attention's and a dense MLP's last projections are scaled by: they then write about as much as ten experts."""

ZERO_CENTRED = ("final_norm", "input_norm", "ffn_norm", "attention.q_norm", "attention.k_norm")
"""Norms that scale by 1 + weight in models of `zero_centred_norms`."""

HEAD_SHARPNESS = 3.0
"""Standard deviation of the head's logits."""


def dummy_dense(
    spec: ModelSpec,
    dtype: Dtype,
    device: torch.device,
    on_bytes: Callable[[int], None],
    embedding_in: Allocate | None = None,
) -> dict[str, torch.Tensor]:
    """All weights outside the experts by canonical name, as `worker.weights.load_dense` gives them.

    The same on every device of one kind. `on_bytes` hears of the bytes drawn; what it raises ends the work.
    """
    drawing = _Drawing(spec, device)
    weights: dict[str, torch.Tensor] = {}
    for name, layer, shape in dense_tensors(spec):
        if name == "embed" and embedding_in is not None:
            tensor = zeros_in(embedding_in)(shape, TORCH_DTYPES[dtype])
        else:
            kind = torch.float32 if stays_float32(name) else TORCH_DTYPES[dtype]
            tensor = torch.empty(shape, dtype=kind, device=device)
        drawing.fill(name, layer or 0, tensor)
        weights[name.format(i=layer)] = tensor
        on_bytes(tensor.nbytes)
    return weights


def popularity(moe: MoeSpec) -> torch.Tensor:
    """The share of tokens that go to each expert, by rank, the most popular first: [E] float64, adding up to K."""
    experts, k = moe.experts, moe.experts_per_token
    ranks = (torch.arange(experts, dtype=torch.float64) + 0.5) / experts
    zipf = (ranks + ZIPF_OFFSET) ** -ZIPF_EXPONENT
    shares = (1 - EVEN_SHARE) * zipf / zipf.sum() + EVEN_SHARE / experts
    top = max(TOP_POPULARITY, (k + experts) / (2 * experts))  # K close to E leaves no room below
    capped = torch.zeros(experts, dtype=torch.bool)
    while True:
        free = k - top * int(capped.sum())
        result = torch.where(capped, top, shares * free / shares[~capped].sum())
        if bool((result <= top).all()):
            return result
        capped = result >= top


class _Drawing:
    """Draws the tensors of one model, one after the other."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        self._generator = torch.Generator(device).manual_seed(SEED)
        self._order = torch.Generator().manual_seed(SEED)
        self._embedding = EMBEDDING_SCALE
        if spec.tie_word_embeddings:
            # The layers' outputs outweigh the embedding: two tokens that like each other would alternate for ever.
            self._embedding = math.sqrt(len(spec.layers) * LAYER_VARIANCE) / 2

    def fill(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        """Draw `tensor`, which `dense_tensors` calls `name`, of layer `layer`."""
        spec, short = self._spec, name.removeprefix("layers.{i}.")
        match short:
            case "embed":
                self._normal(tensor, self._embedding)
                tensor[:, CONSTANT] = self._embedding
            case "head":
                self._normal(tensor, HEAD_SHARPNESS * spec.hidden**-0.5)
            case "final_norm":
                tensor.fill_(1.0)
                if spec.tie_word_embeddings:
                    # As sharp as a head of its own; with signs, or a token's first choice would be itself.
                    tensor.bernoulli_(0.5, generator=self._generator).mul_(2).sub_(1)
                    tensor *= HEAD_SHARPNESS * spec.hidden**-0.5 / self._embedding
                tensor[CONSTANT] = 0
            case "input_norm":
                tensor.fill_(1.0)[CONSTANT] = 0
            case "ffn_norm":
                # Brings the constant to 1, whatever the size of the residual is in this layer.
                variance = self._embedding**2 + layer * LAYER_VARIANCE
                tensor.fill_(1.0)[CONSTANT] = math.sqrt(variance) / self._embedding
            case "attention.q_norm" | "attention.k_norm":
                tensor.fill_(math.sqrt(ATTENTION_SHARPNESS))
            case "attention.q_a_norm" | "attention.kv_a_norm":
                tensor.fill_(1.0)
            case "attention.q_b" | "attention.kv_b":
                self._normal(tensor, tensor.shape[1] ** -0.5)
            case "score_bias":
                tensor.zero_()
            case "delta.gated_norm":
                tensor.fill_(1.0)
            case "delta.conv":
                self._normal(tensor, tensor.shape[-1] ** -0.5)
            case "delta.a_log":
                tensor.uniform_(-4.0, 2.0, generator=self._generator)  # some heads remember long, some do not
            case "attention.o" | "ffn.down" | "shared.down" | "delta.o":
                self._normal(tensor, WRITE_SCALE * tensor.shape[1] ** -0.5)[CONSTANT] = 0
            case "router" | "score_router":
                self._normal(tensor, spec.hidden**-0.5)
                tensor[:, CONSTANT] = self._popularity(layer).to(tensor)
            case bias if bias.endswith("_bias"):
                self._normal(tensor, 0.1)
                if bias == "attention.o_bias":
                    tensor[CONSTANT] = 0
            case _:
                self._normal(tensor, spec.hidden**-0.5)
        if spec.zero_centred_norms and short in ZERO_CENTRED:
            tensor -= 1

    def _normal(self, tensor: torch.Tensor, std: float) -> torch.Tensor:
        return tensor.normal_(0.0, std, generator=self._generator)

    def _popularity(self, layer: int) -> torch.Tensor:
        """The experts' quantiles in this layer's order."""
        moe = self._spec.layers[layer].ffn
        assert isinstance(moe, MoeSpec)
        order = torch.randperm(moe.experts, generator=self._order)
        quantiles: torch.Tensor = torch.special.ndtri(popularity(moe).clamp(max=ALWAYS))
        return quantiles[order]
