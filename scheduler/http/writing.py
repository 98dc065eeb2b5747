"""Bounds how long a client may leave what it is sent unread."""

import asyncio

from starlette.types import Message, Send

from scheduler.http.answering import TooSlow

WRITE_S = 30.0
"""Seconds after which a part of an answer that cannot be written ends its request: what was written before it, 64 KiB
and what the system holds, was not read meanwhile. Well below the time in which a drain has to end."""


def patient(send: Send) -> Send:
    """`send` that raises TooSlow after WRITE_S."""

    async def within(message: Message) -> None:
        try:
            async with asyncio.timeout(WRITE_S):
                await send(message)
        except TimeoutError:
            raise TooSlow(f"nothing could be written for {WRITE_S:g} s") from None

    return within
