"""The weight-transfer backend ``syncline``: one `SynclineWeightTransferEngine` in each worker process of vLLM.

vLLM calls it on the worker's main thread. Data does not come through it: it starts the receiver, lends it the main thread
while a push becomes live, and otherwise stays out of the way.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from syncline.engine.errors import BusyError, ConfigError, SynclineError

from ..checkpoint_manifest import CheckpointTensors, checkpoint_tensors
from .agent import Agent, Place
from .bracket import Bracket
from .info import InitInfo, UpdateInfo
from .main_thread import MainThread
from .plugin import is_dummy
from .rendezvous import Rendezvous
from .versions import interfaces

log = logging.getLogger("syncline.vllm")

_PROBE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An init that cannot be carried out here, and where its source waits."""

    rendezvous: str
    reason: str


class SynclineWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc] # vLLM is not there where types are checked
    """Implements vLLM's worker side of weight transfer (0.21 to 0.33). Select it with ``{"backend": "syncline"}``."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, settings: Any, *rest: Any) -> None:
        """``(config, vllm_config, device, model)`` from 0.25; ``(config, parallel_config[, model])`` before."""
        self._interfaces = interfaces(vllm.__version__)
        super().__init__(config, settings, *rest)
        self._model: torch.nn.Module | None = rest[-1] if rest else None
        self._settings = settings if hasattr(settings, "parallel_config") else _current_config()
        self._main = MainThread()
        self._bracket: Bracket | None = None
        self._wanted: CheckpointTensors | None = None
        self._agent: Agent | None = None
        self._version: int | None = None if is_dummy(self._settings) else 0

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo | Refused:
        """As the base class does it; what cannot be read is told to the source instead of raised."""
        try:
            return InitInfo(**init_dict)
        except TypeError as error:
            why = f"this init_info is not of the syncline that vLLM's workers run ({error}); run the same on both sides"
            return Refused(rendezvous=str(init_dict.get("rendezvous", "")), reason=why)

    def init_transfer_engine(self, init_info: InitInfo | Refused) -> None:
        """Start the receiver; if it runs already, let it say where it is. Why it does not is said at the rendezvous."""
        if isinstance(init_info, InitInfo):
            try:
                self._init(init_info)
                return
            except SynclineError as error:
                init_info = Refused(rendezvous=init_info.rendezvous, reason=str(error))
        place = self._place()
        log.error("rank %d takes no pushes: %s", place.rank, init_info.reason)
        if init_info.rendezvous:
            with contextlib.suppress(SynclineError, OSError):
                Rendezvous(init_info.rendezvous).say(place.rank, "", init_info.reason)
        if not init_info.rendezvous or not Path(init_info.rendezvous).is_dir():  # the source cannot hear it otherwise
            self._raise_if_alone(init_info.reason)

    def _raise_if_alone(self, reason: str) -> None:
        """Where this is vLLM's only worker it may raise: see `main_thread`."""
        if self._settings.parallel_config.world_size == 1:
            raise ConfigError([reason])

    def _init(self, init_info: InitInfo) -> None:
        agent = self._agent
        if agent is not None and agent.alive:
            if agent.info.same_place(init_info):
                agent.announce(init_info)
                return
            _make_room(agent, init_info)
        if self._wanted is None:
            model_config = self._settings.model_config
            self._wanted = checkpoint_tensors(model_config.hf_config, dtype=model_config.dtype)
        self._agent = Agent(
            init_info,
            place=self._place(),
            wanted=self._wanted,
            reload=_Late(self._reload),
            main=self._main,
            initial_version=self._version if agent is None else agent.version,
            initial_digest="" if agent is None else agent.digest,
        )
        self._agent.start()

    def _place(self) -> Place:
        parallel = self._settings.parallel_config
        replica = int(getattr(parallel, "data_parallel_index", 0) or 0)
        replicas = int(getattr(parallel, "data_parallel_size", 1) or 1)
        return Place(
            rank=replica * parallel.world_size + parallel.rank,
            world_size=replicas * parallel.world_size,
            prefix_caching=bool(self._settings.cache_config.enable_prefix_caching),
            media=_takes_media(self._settings),
            no_keep=_why_not_kept(self._settings),
        )

    def _reload(self) -> Bracket:
        if self._bracket is None:
            assert self._model is not None, "before 0.22 the model is known from the first update on"
            self._bracket = Bracket(self._model, self._settings.model_config, owned=self._interfaces.engine_brackets)
        return self._bracket

    def start_weight_update(self) -> None:
        """The bracket is opened by the receiver's loader, once every rank is to load."""
        self._main.updating = True

    def finish_weight_update(self) -> None:
        """The bracket was closed by the receiver's loader, before this rank said that it holds the new version."""
        self._main.updating = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class does it, which asks an accelerator to synchronize where there is none."""
        self.receive_weights(UpdateInfo(push=str(update_info.get("push", ""))))

    def receive_weights(self, update_info: UpdateInfo, load_weights: Callable[..., Any] | None = None) -> None:
        """Lend the main thread to the receiver until the push is over."""
        if self._model is None:
            self._model = getattr(load_weights, "__self__", None)
        if self._main.serve():
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
        elif self._bracket is not None:
            try:
                self._bracket.mend()
            except Exception:
                log.exception("what a failed push left could not be put back; this target stays fenced until a whole push")

    def shutdown(self) -> None:
        """End the receiver. What is served stays so."""
        agent = self._agent
        if agent is not None:
            agent.close()


def _takes_media(settings: Any) -> bool:
    """Whether the model takes more than text (vLLM's ``is_multimodal_model``), and has not been told to leave that."""
    media = getattr(settings.model_config, "multimodal_config", None)
    return media is not None and not getattr(media, "language_model_only", False)


def _why_not_kept(settings: Any) -> str:
    """Why requests in flight of a multimodal model would not survive a push; empty if they would.

    A pause that drops encoders' outputs preempts requests in flight and drops the preprocessed items, too (0.32). Requests run
    their encoders again at the resume, from the items that they still hold. Not so in two cases, each of which ends the engine:
    items in shared memory are given up there, and requests hold no more than where they were; and where the first model runner
    has got a request whose images the prefix cache covered, it has got them without their content and is not sent it later.
    A request that comes in at the very moment of the pause may be answered with an error that says to send it again.
    """
    if not _takes_media(settings):
        return ""
    if getattr(settings.model_config.multimodal_config, "mm_processor_cache_type", "lru") == "shm":
        return "this vLLM keeps images in shared memory, which a push gives up; start it with --mm-processor-cache-type lru"
    finds_covered = settings.cache_config.enable_prefix_caching or getattr(settings, "kv_transfer_config", None) is not None
    if finds_covered and not getattr(settings, "use_v2_model_runner", False):
        return (
            "this vLLM's model runner lacks images that its prefix cache covered and cannot compute their requests anew; start "
            "it with --no-enable-prefix-caching and no KV connector, or with VLLM_USE_V2_MODEL_RUNNER=1"
        )
    return ""


def _make_room(agent: Agent, init_info: InitInfo) -> None:
    """End receivers whose front is gone, for those of the object's next engine. What they hold is known after that.

    Raises:
        ConfigError: they belong to somebody else.
        BusyError: they are in use, or do not end yet.
    """
    if not agent.info.next_front(init_info):
        raise ConfigError(["receivers run here with another url, port or secret: POST /shutdown_weight_transfer_engine first"])
    if _listens(agent.info.url):
        raise BusyError("another TransferEngine is connected to this object: close() that one first, then connect again")
    agent.close()
    if agent.alive:
        raise BusyError("the receivers of the engine before have not ended yet: connect again")


def _listens(url: str) -> bool:
    """Whether anybody listens at a ``unix:`` url. A file that was left behind does not count."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(url.removeprefix("unix:"))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # it has no time for us
            return True
    return True


class _Late:
    """A `loader.Reload` that is made at its first use: before 0.22 the model is not known earlier."""

    def __init__(self, make: Callable[[], Bracket]) -> None:
        self._make = make

    def open(self) -> None:
        self._make().open()

    def load(self, tensors: Any) -> None:
        self._make().load(tensors)

    def close(self) -> None:
        self._make().close()


def _current_config() -> Any:
    """The config of this process, where the constructor does not bring it (before 0.25)."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()
