"""What a family is on the side of files."""

from collections.abc import Callable

from msgspec import Struct

from copyengine.checkpoint.keys import Keys
from copyengine.checkpoint.names import Dialect, under_all_prefixes
from copyengine.model_spec import ModelSpec


class Family(Struct, frozen=True):
    """How the config.json of one architecture is read, and how its checkpoints spell the tensors."""

    model_type: str  # tells the architecture where config.json does not name it
    parse: Callable[[str, Keys], ModelSpec]  # from the architecture and config.json
    dialects: tuple[Dialect, ...]

    @property
    def spellings(self) -> tuple[Dialect, ...]:
        """The dialects under all prefixes that a language model's tensors may have."""
        return under_all_prefixes(self.dialects)
