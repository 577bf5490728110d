"""A caller that writes bytes, for what no HTTP client would send."""

import asyncio
import contextlib
import json
from typing import Any
from urllib.parse import urlsplit


class Caller:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, url: str) -> "Caller":
        address = urlsplit(url)
        return cls(*await asyncio.open_connection(address.hostname, address.port))

    async def send(self, data: bytes) -> "Caller":
        self._writer.write(data)
        await self._writer.drain()
        return self

    async def drip(self, data: bytes, seconds: float) -> None:
        """One byte at a time until the server closes."""
        with contextlib.suppress(ConnectionError):
            for byte in data:
                await self.send(bytes([byte]))
                await asyncio.sleep(seconds)

    async def answer(self) -> tuple[int, dict[str, Any], bool]:
        """Status, JSON body, and whether the server closes after it; (0, {}, True) where it just closed."""
        try:
            head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)
            headers = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if line)
            body = await self._reader.readexactly(int(headers["content-length"]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, {}, True  # a server that closes with bytes of ours unread resets the connection
        return int(head.split()[1]), json.loads(body), headers.get("connection") == "close"

    async def is_closed_by_server(self) -> bool:
        try:
            return await asyncio.wait_for(self._reader.read(), 20) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
