"""`SGLangTarget`: an SGLang server as a source names it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence

from syncline.engine.config import TransferConfig
from syncline.engine.errors import ConfigError, TargetUnreachable
from syncline.engine.targets import LeaderAddress
from syncline.stages.workers import call_in_thread

from ..urls import without_userinfo
from .front import SGLangFront
from .options import SGLangOptions
from .standin import SGLangReceiver


class SGLangTarget:
    """An SGLang server, updated while it serves. Implements `syncline.engine.Target`.

        engine = TransferEngine(source=FSDPSource(model), targets=[SGLangTarget("http://127.0.0.1:30000")])

    Source rank 0 runs the server's stand-in (`SGLangReceiver`) in its own process. Where the target has to outlive the source,
    run an `SGLangReceiver` beside the server and name that one with `RemoteTarget`.

    Args:
        url: the server, ``http://host:port``. It need not be up yet.
        options: how it is reached and updated.
    """

    def __init__(self, url: str, options: SGLangOptions | None = None) -> None:
        self._url = url
        self._options = options or SGLangOptions()
        self._standin: SGLangReceiver | None = None
        self._folder = ""

    @property
    def address(self) -> str:
        """The URL."""
        return without_userinfo(self._url)

    @property
    def standin(self) -> SGLangReceiver | None:
        """What stands in for the server, on source rank 0 once it is connected."""
        return self._standin

    def problems(self, config: TransferConfig) -> Sequence[str]:
        """The URL is none, or the landing mode cannot be had."""
        problems: list[str] = []
        try:
            SGLangFront(self._url)
        except ConfigError as error:
            problems += [f"target {problem}" for problem in error.problems]
        else:
            problems += self._options.problems(self._url)
        if config.landing == "mapped":
            problems.append(
                f"target {self.address}: an SGLang server cannot map memory of others; use landing 'staged' or 'streamed'"
            )
        return problems

    async def locate(self, config: TransferConfig) -> LeaderAddress:
        """Start the stand-in, or look whether the server is still the one that it was started for.

        Raises:
            TargetUnreachable: no server is there, or it did not answer in time.
            BusyError: another source is updating it.
            ProtocolError, ConfigError: it is there and cannot be a target; says why.
        """
        timeout_s = 0.9 * config.connect_timeout_s  # whoever asks waits no longer than all of it, and knows less
        try:
            async with asyncio.timeout(timeout_s):
                return await self._locate(config)
        except TimeoutError:
            raise TargetUnreachable(
                f"{self._url} did not answer as an SGLang server does within {timeout_s:.3g} s; is it one, and is it up?"
            ) from None

    async def _locate(self, config: TransferConfig) -> LeaderAddress:
        if self._standin is not None:
            await self._standin.attach()
            return LeaderAddress(self._standin.address, config.secret)
        try:
            self._folder = tempfile.mkdtemp(prefix="syncline-")  # 0700
            standin = SGLangReceiver(
                self._url,
                listen=f"unix:{self._folder}/sglang.sock",
                options=self._options,
                secret=config.secret,
                bind_host=config.bind_host,
            )
            await standin.start()
        except BaseException:
            await self._remove_folder()
            raise
        self._standin = standin
        return LeaderAddress(standin.address, config.secret)

    async def close(self) -> None:
        """End the stand-in. The server goes on with what it serves."""
        try:
            if self._standin is not None:
                await self._standin.close()
                self._standin = None
        finally:
            await self._remove_folder()

    async def _remove_folder(self) -> None:
        folder, self._folder = self._folder, ""
        if folder:
            await call_in_thread(lambda: shutil.rmtree(folder, ignore_errors=True), name="syncline-remove")
