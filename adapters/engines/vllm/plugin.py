"""What vLLM loads of syncline by its entry points, which are all named ``syncline``.

``vllm.general_plugins``: registers the backend, in every process of vLLM. In the engine's own process it also sees to it that
nobody resumes an engine whose weights are no whole version, and that it leaves the cores to the workers while they load:
`refuse_to_resume`, `sleep_during_updates`.

Where entry points are not loaded (``VLLM_PLUGINS`` names others), ``--worker-extension-cls
syncline.adapters.engines.vllm.plugin.WorkerExtension`` registers the backend, too; not the latter.

``vllm.endpoint_plugins`` (0.32; loaded only with ``VLLM_PLUGINS=syncline``): a server with random weights is paused before it
takes its first request. Without it such a server answers from them until a source has located it.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from ..unfinished import UNFINISHED

BACKEND = "syncline"


def register() -> None:
    """Make ``{"backend": "syncline"}`` known to vLLM. May be called again. Does nothing in a vLLM without such backends."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(
            BACKEND, "syncline.adapters.engines.vllm.backend", "SynclineWeightTransferEngine"
        )
    refuse_to_resume()
    sleep_during_updates()


def refuse_to_resume() -> None:
    """Have vLLM's engine raise when it is asked to resume while it says `UNFINISHED` as its weights' version (0.27 and later).

    Where a release has nothing of the kind, it is left as it is.
    """
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return
    resume = getattr(EngineCore, "resume_scheduler", None)
    if resume is None or getattr(resume, "of_syncline", False):
        return

    @functools.wraps(resume)
    def guarded(core: Any) -> Any:
        if str(getattr(core, "_weight_version", "")).startswith(UNFINISHED):
            raise RuntimeError(
                "syncline has fenced this engine: its weights are no whole version; it resumes with the next push"
            )
        return resume(core)

    guarded.of_syncline = True  # type: ignore[attr-defined]
    EngineCore.resume_scheduler = guarded


def sleep_during_updates() -> None:
    """Have vLLM's engine sleep, rather than spin, while its workers carry out ``update_weights``.

    It spins for a second after each message, to answer the next one sooner. On few cores that takes one from the loading. Where
    a release waits in another way, it is left as it is.
    """
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return
    call = getattr(EngineCore, "collective_rpc", None)
    if call is None or getattr(call, "of_syncline", False):
        return

    @functools.wraps(call)
    def asleep(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "update_weights":
            for answers in getattr(core.model_executor, "response_mqs", ()):
                condition: Any = getattr(answers, "_spin_condition", None)
                if hasattr(condition, "last_read"):
                    condition.last_read = float("-inf")  # its last message is long ago: it waits to be woken
        return call(core, method, *args, **kwargs)

    asleep.of_syncline = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = asleep


class WorkerExtension:
    """For ``--worker-extension-cls``: importing this module in a worker registers the backend."""


class PausedStart:
    """Implements vLLM's ``EndpointPlugin``, without endpoints: pauses a server whose weights are random."""

    name = "syncline"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """No endpoints."""

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Called before the server listens."""
        settings = getattr(engine_client, "vllm_config", None)
        transfer = getattr(settings, "weight_transfer_config", None)
        if transfer is not None and transfer.backend == BACKEND and is_dummy(settings):
            await engine_client.pause_generation(mode="abort")


def is_dummy(settings: Any) -> bool:
    """Whether vLLM was started with random weights (``--load-format dummy``). Takes its ``VllmConfig``."""
    return str(getattr(settings.load_config, "load_format", "")).rpartition(".")[2].lower() == "dummy"


register()
