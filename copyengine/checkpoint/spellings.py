"""The prefixes under which checkpoints hold a language model: alone, or as a part of one that also sees.

The families' tables spell one of them; the others follow from it.
"""

from collections.abc import Iterator

PREFIXES = (
    ("model.", "lm_head."),
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
)
"""Of the decoder's tensors, and of the head's."""


def respelt(name: str) -> tuple[str, ...]:
    """`name` under each of the prefixes, in their order; alone if it has none of them."""
    for inner, head in sorted(PREFIXES, key=lambda prefixes: -len(prefixes[0])):
        for at, prefix in enumerate((inner, head)):
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                return tuple(both[at] + rest for both in PREFIXES)
    return tuple(_headless(name))


def _headless(name: str) -> Iterator[str]:
    """A module may be the head itself."""
    heads = [head.rstrip(".") for _, head in PREFIXES]
    yield from dict.fromkeys(heads) if name in heads else (name,)
