"""A front over a scheduler with a made-up worker, in this process, kept for all inputs; and whether it stayed well."""

import asyncio
import logging
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tests.scheduler.http.chats import write_chat_model
from tests.scheduler.http.rig import HttpRig, serving

T = TypeVar("T")
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{{ m.tool_calls|tojson if m.tool_calls }}{% endfor %}"
LIMIT_S = 60.0


class _Faults(logging.Handler):
    """What was logged as an error: a traceback, in most cases."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.records.append(text + (str(record.exc_info[1]) if record.exc_info else ""))


class LiveEngine:
    """Made with the first input."""

    _only: "LiveEngine | None" = None

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._faults = _Faults()
        logging.getLogger().addHandler(self._faults)
        self._directory = tempfile.TemporaryDirectory()
        directory = write_chat_model(Path(self._directory.name), TEMPLATE)
        limits = {"max_model_len": 64, "max_queued_requests": 8}
        self._serving = serving(directory, engine=limits, http_max_body_bytes=65536)
        self.rig: HttpRig = self._loop.run_until_complete(self._serving.__aenter__())

    @classmethod
    def running(cls) -> "LiveEngine":
        cls._only = cls._only or LiveEngine()
        return cls._only

    def over(self, session: Coroutine[Any, Any, T]) -> T:
        """Run `session`; nothing may be left of it, and nothing have been logged as an error."""

        async def limited() -> T:
            async with asyncio.timeout(LIMIT_S):
                result = await session
                await self.rig.at_rest()
                return result

        result = self._loop.run_until_complete(limited())
        assert not self._faults.records, self._faults.records
        return result

    @classmethod
    def end(cls) -> None:
        """Stop it, if it was made."""
        if cls._only:
            logging.getLogger().removeHandler(cls._only._faults)
            cls._only._loop.run_until_complete(cls._only._serving.__aexit__(None, None, None))
            cls._only._loop.close()
            cls._only._directory.cleanup()
            cls._only = None
