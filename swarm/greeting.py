"""The two ends of a handshake on a live channel: the sinks that feed `handshake.py` until a link takes over.

Owns the handshake's deadline on the listener's side. Knows not who is welcome: whoever made it decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from routing.errors import ProtocolError, SwarmError, Unreachable
from swarm.channel import Channel
from swarm.handshake import Answer, Answering, Dialling, Hello, Verdict


class Outbound:
    """The sink of a connection that we dialled, until it is welcome.

    `on_welcome` is called at that very moment, since frames may follow at once.
    """

    channel: Channel

    def __init__(self, machine: Dialling, on_welcome: Callable[[Outbound], None]):
        self.machine = machine
        self.taken = False  # by a link
        self.error: SwarmError | None = None
        self._on_welcome = on_welcome
        self._changed = asyncio.Event()

    def begin(self, channel: Channel) -> None:
        self.channel = channel
        channel.sink = self
        channel.write([self.machine.start()])

    def fail(self, channel: Channel, error: SwarmError) -> None:
        """The channel leads to somebody else."""
        self.channel, self.error = channel, error
        channel.sink = self
        channel.abort()
        self._changed.set()

    async def ready(self) -> bytes:
        """The listener's nonce; the hello can be sent now. Raises ProtocolError or Unreachable."""
        while self.machine.nonce is None:
            await self._change()
        return self.machine.nonce

    async def answered(self) -> Answer:
        """The verdict. Raises ProtocolError or Unreachable."""
        while self.machine.answer is None:
            await self._change()
        return self.machine.answer

    async def _change(self) -> None:
        if self.error is not None:
            raise self.error
        self._changed.clear()
        await self._changed.wait()

    def data_received(self, data: bytes) -> None:
        if self.error is not None or self.taken:
            return
        try:
            self.machine.receive_data(data)
        except ProtocolError as error:
            self.fail(self.channel, error)
            return
        answer = self.machine.answer
        if answer is not None and answer.verdict is Verdict.WELCOME:
            self._on_welcome(self)
        self._changed.set()

    def writable(self) -> None:
        pass  # a handshake fits any buffer

    def channel_lost(self, reason: str) -> None:
        self.error = self.error or Unreachable(f"the connection was {reason}")
        self._changed.set()


class Inbound:
    """The sink of a connection that somebody dialled, until it is decided whether it stays."""

    channel: Channel

    def __init__(self, machine: Answering, on_hello: Callable[[Inbound], None], on_gone: Callable[[Inbound], None]):
        self.machine = machine
        self.held = self.gone = False  # gone: decided, or lost
        self._on_hello, self._on_gone = on_hello, on_gone
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def hello(self) -> Hello:
        assert self.machine.hello is not None, "asked before the hello came"
        return self.machine.hello

    def begin(self, channel: Channel, handshake_s: float) -> None:
        self.channel = channel
        channel.sink = self
        self._deadline = asyncio.get_running_loop().call_later(handshake_s, channel.abort)
        channel.write([self.machine.start()])

    def turn_away(self, channel: Channel) -> None:
        """End a connection before it says a word."""
        self.channel, self.gone = channel, True
        channel.sink = self
        channel.abort()

    def hold(self) -> None:
        """The verdict waits for our own dial to the same process, which has a deadline of its own."""
        self.held = True
        if self._deadline is not None:
            self._deadline.cancel()

    def welcome(self) -> None:
        """Frames may follow: the caller puts a link in this sink's place."""
        self._leave()
        self.channel.write([self.machine.verdict(Verdict.WELCOME)])

    def refuse(self, verdict: Verdict, text: str = "") -> None:
        if not self.gone:
            self._leave()
            self.channel.write([self.machine.verdict(verdict, text)])
            self.channel.close()

    def data_received(self, data: bytes) -> None:
        if self.gone:
            return
        try:
            self.machine.receive_data(data)
        except ProtocolError as error:
            self.refuse(Verdict.REFUSED, str(error))
            return
        if self.machine.hello is not None and not self.held:
            self._on_hello(self)

    def writable(self) -> None:
        pass  # a handshake fits any buffer

    def channel_lost(self, reason: str) -> None:
        if not self.gone:
            self._leave()

    def _leave(self) -> None:
        self.gone = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._on_gone(self)
