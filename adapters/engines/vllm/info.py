"""What travels through vLLM's own calls to its workers: two small dataclasses, JSON on the way.

vLLM makes them of the ``init_info`` and ``update_info`` that its endpoints get; an unknown or missing field is refused there.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path

from syncline.engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class InitInfo:
    """``init_info``: how workers and the source find each other. See `VLLMTarget`.

    Attributes:
        url: vLLM's own endpoints, as its workers reach them: ``http://host:port``, or ``unix:/path`` (offline).
        version: release of vLLM, as the endpoints say.
        rendezvous: 0700 directory of the source, in which each rank says that it is there (one host).
        control_port: port at which the leader rank listens; 0: a unix socket (one host).
        host: under which sources reach the leader, with ``control_port``.
        secret: shared secret; or ``secret_file``: a file of the workers' host that holds it.
        patience_s: the longest that a worker looks for its leader, in seconds.
        idles: a pause there holds only once no request is in flight (an ``LLM``). Said by `offline`.
    """

    url: str
    version: str
    rendezvous: str = ""
    control_port: int = 0
    host: str = ""
    secret: str = ""
    secret_file: str = ""
    patience_s: float = 60.0
    idles: bool = False

    def shared_secret(self) -> str | None:
        """The secret, from wherever it is. Raises `ConfigError` if its file cannot be read."""
        if not self.secret_file:
            return self.secret or None
        try:
            secret = Path(self.secret_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError([f"secret_file {self.secret_file!r}: vLLM's workers cannot read it: {error}"]) from None
        if not secret:
            raise ConfigError([f"secret_file {self.secret_file!r} is empty on the host of vLLM's workers"])
        return secret

    def same_place(self, other: InitInfo) -> bool:
        """Whether receivers that were started with ``other`` can go on with this: all but rendezvous and patience is equal."""
        mine, others = self.shared_secret() or "", other.shared_secret() or ""
        return (self.url, self.version, self.control_port, self.host) == (
            other.url, other.version, other.control_port, other.host,
        ) and hmac.compare_digest(mine.encode(), others.encode())  # fmt: skip

    def next_front(self, other: InitInfo) -> bool:
        """Whether both are fronts of objects, and not the same one: every engine makes its own (see `offline`)."""
        return self.url.startswith("unix:") and other.url.startswith("unix:") and self.url != other.url


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """``update_info``: nothing but a mark for logs. The data came by syncline's own transports."""

    push: str = ""
