"""JSON of a schema in llguidance's dialect of Lark. Pure."""

import json
from collections.abc import Mapping
from typing import Any

BLANKS = "[ \\n\\t]{1,16}"
"""What may stand between the parts of a JSON text: unbounded, a model may go on with blanks for ever."""


def json_of(schema: Mapping[str, Any]) -> str:
    """The expression of what matches the JSON schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': BLANKS}})}"
