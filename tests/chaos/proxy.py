"""A network that can fail: unix sockets that forward to a server's socket, until they are told otherwise.

All of them are served by one thread. Each worker has proxies of its own, so that one worker can be cut off alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
"""PostgreSQL's message for it, as psycopg sends it."""

_BLOCK_BYTES = 2**16
_ANSWER_SECONDS = 5.0


class Network:
    """The thread behind the proxies."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._proxies: list[Proxy] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def proxy(self, listen: Path, server: Path, *, sql: bool = False) -> Proxy:
        """Listens there from now on. Only with ``sql`` it looks for commits."""
        proxy = Proxy(self, listen, server, sql=sql)
        self.wait(proxy.open())
        self._proxies.append(proxy)
        return proxy

    def wait(self, doing: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(doing, self._loop).result(30)

    def call(self, action: Callable[[], object]) -> None:
        async def do() -> None:
            action()

        self.wait(do())

    def close(self) -> None:
        async def end() -> None:
            for proxy in self._proxies:
                proxy.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self.wait(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Proxy:
    """One socket to listen at. Every method may be called from any thread."""

    def __init__(self, network: Network, listen: Path, server: Path, *, sql: bool) -> None:
        self.listen = listen
        self.sql = sql
        self.cut_commits = 0
        """How many connections were cut after their COMMIT."""
        self._network = network
        self._server = server
        self._listener: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._refusing = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._commits_to_cut: list[bytes] = []

    async def open(self) -> None:
        self.listen.parent.mkdir(parents=True, exist_ok=True)
        self._listener = await asyncio.start_unix_server(self._accept, self.listen)

    def close(self) -> None:
        """In the network's thread, as :meth:`open`."""
        if self._listener is not None:
            self._listener.close()

    def cut(self) -> None:
        """Every connection ends at once; new ones are taken."""
        self._network.call(self._cut)

    def refuse(self) -> None:
        """Every connection ends, and so does each new one, until :meth:`restore`."""
        self._network.call(self._refuse)

    def stall(self) -> None:
        """Nothing goes through, until :meth:`restore`."""
        self._network.call(self._flowing.clear)

    def restore(self) -> None:
        self._network.call(self._restore)

    def cut_after_commit(self, writing: bytes) -> None:
        """The next transaction in which ``writing`` was sent is committed, and its client is cut off before it hears
        of it."""
        self._network.call(lambda: self._commits_to_cut.append(writing))

    def forget_commits(self) -> None:
        """None is cut any more."""
        self._network.call(self._commits_to_cut.clear)

    def _cut(self) -> None:
        for link in list(self._links):
            link.cut()

    def _refuse(self) -> None:
        self._refusing = True
        self._cut()

    def _restore(self) -> None:
        self._refusing = False
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            link = _Link((reader, writer), await asyncio.open_unix_connection(self._server), self)
        except OSError:  # the server is down
            writer.transport.abort()
            return
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)

    async def flow(self) -> None:
        await self._flowing.wait()

    def wants_cut(self, transaction: bytes) -> bool:
        """Whether the connection that commits this is to be cut; it is then no longer wanted."""
        for writing in self._commits_to_cut:
            if writing in transaction:
                self._commits_to_cut.remove(writing)
                self.cut_commits += 1
                return True
        return False


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """One connection through a proxy."""

    def __init__(self, client: _Stream, server: _Stream, proxy: Proxy) -> None:
        self._client, self._server, self._proxy = client, server, proxy
        self._transaction = b""
        self._answered = asyncio.Event()
        self._is_cut = False

    async def run(self) -> None:
        pumps = [asyncio.ensure_future(self._to_server()), asyncio.ensure_future(self._to_client())]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self.cut()

    def cut(self) -> None:
        for _, writer in (self._client, self._server):
            writer.transport.abort()

    async def _to_server(self) -> None:
        (reader, _), (_, writer) = self._client, self._server
        with contextlib.suppress(OSError):
            while block := await reader.read(_BLOCK_BYTES):
                await self._proxy.flow()
                if self._proxy.sql and self._commits_unheard(block):
                    await self._commit_and_cut(block)
                    return
                writer.write(block)
                await writer.drain()

    def _commits_unheard(self, block: bytes) -> bool:
        """Whether the transaction ends with this block, and its client is not to hear of it."""
        self._transaction = (self._transaction + block)[-(2**20) :]
        if not self._transaction.endswith(_COMMIT):
            return False
        transaction, self._transaction = self._transaction, b""
        return self._proxy.wants_cut(transaction)

    async def _commit_and_cut(self, block: bytes) -> None:
        """The server's answer shows that it is committed; the client never gets it."""
        self._is_cut = True
        self._server[1].write(block)
        await self._server[1].drain()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._answered.wait(), _ANSWER_SECONDS)

    async def _to_client(self) -> None:
        (_, writer), (reader, _) = self._client, self._server
        with contextlib.suppress(OSError):
            while block := await reader.read(_BLOCK_BYTES):
                if self._is_cut:
                    self._answered.set()
                    continue
                await self._proxy.flow()
                writer.write(block)
                await writer.drain()
