"""How much memory the largest step takes for a while, estimated: pure, no I/O. Other sizes are copyengine.budget's."""

from copyengine.model_spec import GatedDeltaSpec, GqaSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec
from kernels.formats import ITEMSIZE

ATTENTION_ROWS = 512
"""Rows of a sequence that attention takes at once on the host: QUERY_BLOCK of kernels/attention/ref.py."""
LATENT_PAIRS = 512
"""Pairs of row and head whose scores are held at once on the host: BLOCK_PAIRS of kernels/latent_attention/ref.py."""

SINK_SCORES = 1 << 20
"""Scores that attention with sinks writes out at once on the host, or those of one row: of kernels/attention/ref.py."""

CHANGED_ROWS = 4
CHANGED_NBYTES = 50
"""Rows with changed logits that are drawn at once, BLOCK_ROWS of worker/drawing.py, and what that takes per row and
token of the vocabulary."""

DRAW_CHUNK, DRAW_BANDS, DRAW_CANDIDATES = 1024, 32, 65_536
"""CHUNK, BANDS and CANDIDATES of kernels/sampling/tri.py."""

DELTA_PIECE_ROWS = 64
"""PIECE_ROWS of kernels/state_pieces.py: two square matrices in float32 of every piece and value head, on a GPU."""

GPU_SLACK_PERCENT = 125
"""What torch's allocator holds on a GPU, of what is alive in one layer at most: it keeps blocks of other sizes than are
asked for next. Measured with the largest step first, as in the rehearsal: the workspace so planned is 107 to 138 % of
what torch held at most with up to 8 sequences at once, T 512 to 16,384, and everything on the GPU 100 to 101 %; at 64
sequences, where the logits of prefill and of decode are both counted, 103 % (H200, torch 2.11, 2026-11)."""

CUBLAS_NBYTES = 32 << 20
"""What cuBLAS works in, for good."""


def host_step_nbytes(spec: ModelSpec, tokens: int, max_running: int) -> int:
    """Of a step of T = `tokens` on the host, or of one that decodes `max_running` sequences, without the context.

    The activations of one layer, taken as float32; logits of every running sequence, what is made of the rows that are
    changed at a time, and what drawing from one row takes, in float64.
    """
    row = max(_host_row(layer, spec.hidden) for layer in spec.layers)
    changed = min(max_running, CHANGED_ROWS) * CHANGED_NBYTES
    return 4 * tokens * row + spec.vocab_size * (4 * max_running + changed + 6 * 8)


def context_nbytes(spec: ModelSpec, dtype: str, tokens: int, kv_tokens: int) -> int:
    """Bytes that attention takes on the host for the context of one sequence of all positions that the pages can hold.

    Keys and values are gathered from their pages, then repeated for each head; the mask of ATTENTION_ROWS rows is held
    as bool and as `dtype`. Scores [heads, T, context] are not held, but of LATENT_PAIRS rows over latents, and with
    sinks SINK_SCORES of them, up to four times in float32. Measured at T = 512, 16 heads and 4 KV heads of 64,
    16,384 positions: peak 185 MB of float32 and 101 of bfloat16, where this says 210 and 109 (torch 2.13, 2-core AMD
    EPYC, 2026-11).
    """
    context = min(spec.max_position, kv_tokens)
    row = max(_context_nbytes(layer.attention, tokens, ITEMSIZE[dtype]) for layer in spec.layers)
    return context * row + _sink_nbytes(spec, context)


def _sink_nbytes(spec: ModelSpec, context: int) -> int:
    """Of the scores that attention with sinks writes out."""
    attentions = (layer.attention for layer in spec.layers)
    heads = max((a.heads for a in attentions if isinstance(a, GqaSpec) and a.sinks), default=0)
    return 4 * 4 * max(SINK_SCORES, heads * context) if heads else 0


def _context_nbytes(spec: GqaSpec | GatedDeltaSpec | MlaSpec, tokens: int, itemsize: int) -> int:
    """Of each position of a context."""
    match spec:
        case GqaSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim):
            return 2 * (heads + kv_heads) * head_dim * itemsize + min(tokens, ATTENTION_ROWS) * (1 + itemsize)
        case GatedDeltaSpec():
            return 0
        case MlaSpec(rank=rank, rope_dim=rope_dim, heads=heads):
            # Latents, gathered and as float32, and keys of them; scores as float32, masked and as weights.
            pairs = min(tokens * heads, max(LATENT_PAIRS, heads))
            return rank * (itemsize + 4) + (rank + rope_dim) * 4 + rope_dim * (itemsize + 4) + pairs * 8


def gpu_step_nbytes(spec: ModelSpec, dtype: str, tokens: int, max_running: int) -> int:
    """Of a step of T = `tokens` on a GPU, whose attention reads its pages where they are.

    The activations of one layer, GPU_SLACK_PERCENT of them, and CUBLAS_NBYTES; logits of every running sequence as they
    are computed and as float32, and what drawing from them takes, all of it once more for decode graphs, which have
    memory of their own; what is made of the rows that are changed at a time.
    """
    row = max(_gpu_row_nbytes(layer, spec.hidden, ITEMSIZE[dtype]) for layer in spec.layers)
    logits = 2 * max_running * (spec.vocab_size * (ITEMSIZE[dtype] + 4) + _draw_nbytes(spec.vocab_size))
    changed = spec.vocab_size * min(max_running, CHANGED_ROWS) * CHANGED_NBYTES
    return GPU_SLACK_PERCENT * tokens * row // 100 + CUBLAS_NBYTES + logits + changed


def _draw_nbytes(vocab_size: int) -> int:
    """Of one row on a GPU: a band's logits with their places; of each chunk and of each band of it a count and a mass,
    of each chunk the largest logit, its id and a list entry too."""
    chunks = -(-vocab_size // DRAW_CHUNK)
    return min(vocab_size, DRAW_CANDIDATES) * (4 + 4) + chunks * (DRAW_BANDS * (4 + 8) + 4 + 4 + 8 + 4)


def _delta_row(spec: GatedDeltaSpec) -> int:
    """Elements per token of gated DeltaNet: its product, what the convolution makes of it, the output and its norm."""
    value = spec.v_heads * spec.v_dim
    return 2 * spec.conv_channels + 3 * value + 2 * spec.v_heads


def _host_row(layer: LayerSpec, hidden: int) -> int:
    """Elements per token that are alive in one layer at most."""
    match layer.attention:
        case GqaSpec() as a:
            attention = ((3 if a.output_gate else 2) * a.heads + 2 * a.kv_heads) * a.head_dim
        case GatedDeltaSpec() as delta:
            attention = _delta_row(delta) + 3 * delta.conv_channels  # padded, summed, and q, k and v by value head
        case MlaSpec() as mla:
            attention = _latent_row(mla)
    match layer.ffn:
        case MoeSpec(experts=experts, experts_per_token=k, intermediate=intermediate, shared_intermediate=shared):
            ffn = (hidden if layer.ffn.grouped else 0) + experts + k * (2 * hidden + 3 * intermediate) + 3 * shared
        case dense:
            ffn = 3 * dense.intermediate
    return 4 * hidden + max(attention, ffn)


def _gpu_row_nbytes(layer: LayerSpec, hidden: int, itemsize: int) -> int:
    """Bytes per token that are alive in one layer at most.

    The residual, its norm and the layer's output; attention's product, rotated q and k and output, or what gated
    DeltaNet has in their place, or the norm in a second order (for NVFP4), the router's logits, each route's two
    intermediate rows and three words, or an MLP's products, of the shared expert after those. Beside all of them the
    angles of the rotation, in float32.
    """
    angles = 0
    match layer.attention:
        case GqaSpec() as a:
            heads = (4 if a.output_gate else 3) * a.heads + 3 * a.kv_heads
            attention = itemsize * (3 * hidden + heads * a.head_dim)
            angles = 8 * a.head_dim
        case GatedDeltaSpec() as delta:
            attention = itemsize * (3 * hidden + _delta_row(delta)) + 2 * 4 * DELTA_PIECE_ROWS * delta.v_heads
        case MlaSpec() as mla:
            attention = itemsize * (3 * hidden + _latent_row(mla))
            angles = 8 * mla.rope_dim
    match layer.ffn:
        case MoeSpec(experts=experts, experts_per_token=k, intermediate=intermediate, shared_intermediate=shared):
            grouped = 4 * (hidden + experts) if layer.ffn.grouped else 0  # the router's in float32
            routed = itemsize * (4 * hidden + experts + k * (hidden + intermediate)) + 12 * k + grouped
            ffn = max(routed, itemsize * (hidden + experts + _mlp_row(hidden, shared)) + 8 * k)
        case dense:
            ffn = itemsize * _mlp_row(hidden, dense.intermediate)
    return angles + max(attention, ffn)


def _mlp_row(hidden: int, intermediate: int) -> int:
    """Elements: residual and norm, gate and up, the activation, its product with up, or then the output."""
    return 2 * hidden + max(4 * intermediate, 3 * intermediate + hidden)


def _latent_row(spec: MlaSpec) -> int:
    """Elements per token of latent attention: q, its rotated part and what is made of it for latents; what is attended
    and the values of it, in two orders."""
    q = spec.q_rank + spec.heads * (spec.nope_dim + 2 * spec.rope_dim + spec.rank)
    return q + 3 * (spec.rank + spec.rope_dim) + spec.heads * (spec.rank + 2 * spec.value_dim)
