"""Where a source on one host receives those that link up: doorway, token, and who is awaited. For one-sided transports."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from syncline.scheduler.programs import ReceiverId

from ..completions import Signal
from ..errors import TransportError
from .channel import Channel, Kind, Message
from .doorway import Doorway


class Reception:
    """The doorway is open while receivers are awaited.

    Args:
        directory: where the doorway is made; a short path.
        welcome: called on the loop with each awaited receiver that has come, and its channel, to be handed over.

    Attributes:
        token: what a receiver has to say to be let in; travels in the offer.
    """

    def __init__(self, directory: Path | None, welcome: Callable[[ReceiverId, Channel], None]) -> None:
        self.token = secrets.randbits(64)
        self._directory = directory
        self._welcome = welcome
        self._doorway: Doorway | None = None
        self._strangers: set[Channel] = set()
        self._awaited: dict[ReceiverId, Signal[None]] = {}

    def expect(self, receivers: Iterable[ReceiverId]) -> str:
        """Open the doorway for ``receivers``; its path."""
        if self._doorway is None:
            self._doorway = Doorway(self._accept, self._directory)
        for receiver in receivers:
            self._awaited[receiver] = Signal()
        return self._doorway.path

    async def arrivals(self, receivers: Collection[ReceiverId], timeout_s: float) -> dict[ReceiverId, TransportError]:
        """Wait until those that were expected are `ready`; which are not after ``timeout_s`` seconds, and why."""
        failed: dict[ReceiverId, TransportError] = {}
        until = asyncio.get_running_loop().time() + timeout_s
        for receiver in receivers:
            signal = self._awaited.get(receiver)
            try:
                if signal is None:
                    raise TransportError(f"receiver {receiver} was not offered a link")
                async with asyncio.timeout_at(until):
                    await signal
            except TimeoutError:
                failed[receiver] = TransportError(f"receiver {receiver} did not link up within {timeout_s:g} s")
            except TransportError as error:
                failed[receiver] = error
            self._awaited.pop(receiver, None)
        self.close_if_idle()
        return failed

    def ready(self, receiver: ReceiverId) -> None:
        """It has linked up."""
        signal = self._awaited.get(receiver)
        if signal is not None:
            signal.set()

    def fail(self, receiver: ReceiverId, error: TransportError) -> None:
        """It will not link up; whoever waits for it is told."""
        signal = self._awaited.get(receiver)
        if signal is not None:
            signal.fail(error)

    def forget(self, receiver: ReceiverId) -> None:
        """It is not awaited any more."""
        signal = self._awaited.pop(receiver, None)
        if signal is not None:
            signal.fail(TransportError("dropped by the source"))

    def close_if_idle(self) -> None:
        """Close the doorway if nobody is awaited."""
        if not self._awaited and self._doorway is not None:
            self._doorway.close()
            self._doorway = None

    def close(self) -> None:
        """Send everyone away. Idempotent."""
        for receiver in list(self._awaited):
            self.forget(receiver)
        self.close_if_idle()
        for stranger in list(self._strangers):
            stranger.close()
        self._strangers.clear()

    def _accept(self, connection: socket.socket) -> None:
        # who it is is known only when it has said so, over the channel that is being made here
        stranger: list[Channel] = []
        channel = Channel(
            connection,
            on_message=lambda message: self._hello(stranger[0], message),
            on_closed=lambda _: self._strangers.discard(stranger[0]),
        )
        stranger.append(channel)
        self._strangers.add(channel)

    def _hello(self, channel: Channel, message: Message) -> None:
        receiver = ReceiverId(message.a, message.b)
        self._strangers.discard(channel)
        if message.kind is not Kind.HELLO or message.push != self.token or receiver not in self._awaited:
            channel.close()
            return
        self._welcome(receiver, channel)
