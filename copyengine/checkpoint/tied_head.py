"""A head that the files hold although config.json says that it is the token embedding: the embedding is used."""

import numpy as np

from copyengine.checkpoint.files import Files
from copyengine.checkpoint.model import Model
from copyengine.wire.logs import Log

PIECE_NBYTES = 32 << 20
"""Bytes that are compared at a time, so that two matrices of GB take no memory to speak of."""

log = Log(__name__)


def warn_of_another_head(model: Model) -> None:
    """A warning if the stored head is another matrix than the embedding. ConfigError if a file is cut short."""
    head = model.spare_head
    if head is None or not head.nbytes or _is_embedding(model):
        return
    log.warning(
        "head_unused",
        file=str(head.path),
        detail="holds a head that differs from the token embedding, which is used instead of it since config.json says "
        "tie_word_embeddings: true; if that is wrong, start with --hf-overrides '{\"tie_word_embeddings\": false}'",
    )


def _is_embedding(model: Model) -> bool:
    """Byte by byte: the same matrix in another element type would have been rounded."""
    head, embed = model.spare_head, model.dense["embed"]
    assert head is not None
    if (head.dtype, head.shape) != (embed.dtype, embed.shape):
        return False
    pieces = [np.empty(min(PIECE_NBYTES, embed.nbytes), np.uint8) for _ in range(2)]
    with Files() as left, Files() as right:
        for start in range(0, embed.nbytes, PIECE_NBYTES):
            ours, theirs = (piece[: embed.nbytes - start] for piece in pieces)
            left.read_into(embed.path, embed.offset + start, ours.data)
            right.read_into(head.path, head.offset + start, theirs.data)
            if not np.array_equal(ours, theirs):
                return False
    return True
