"""What a family is on the side of files."""

from collections.abc import Callable

from msgspec import Struct

from copyengine.checkpoint.keys import Keys
from copyengine.checkpoint.names import Dialect
from copyengine.model_spec import ModelSpec


class Family(Struct, frozen=True):
    """How the config.json of one architecture is read, and how its checkpoints spell the tensors."""

    model_type: str  # tells the architecture where config.json does not name it
    parse: Callable[[str, Keys], ModelSpec]  # from the architecture and config.json
    dialects: tuple[Dialect, ...]
