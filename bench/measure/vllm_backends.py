"""Which of vLLM's own weight transfer backends can run here: tries what each needs first, and says what came of it.

    python -m syncline.bench.measure.vllm_backends

prints one JSON object: backend -> why not (empty if that worked).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable

import torch


def _nccl() -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    NCCLLibrary()
    _cuda()


def _cuda() -> None:
    torch.cuda.get_device_properties(0)


_NEEDS: dict[str, Callable[[], None]] = {"nccl": _nccl, "sparse_nccl": _nccl, "nccl_m2n": _nccl, "ipc": _cuda}


def _why_not(backend: str, load: Callable[[], type]) -> str:
    try:
        importlib.import_module(load().__module__)
        _NEEDS.get(backend, _cuda)()
    except Exception as error:  # noqa: BLE001 - whatever it is, is the answer
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def main() -> None:
    """Entry point."""
    with contextlib.redirect_stdout(sys.stderr):  # vLLM logs there
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        registry = WeightTransferEngineFactory._registry  # noqa: SLF001 - there is no list of them otherwise
        found = {name: _why_not(name, load) for name, load in registry.items() if name != "syncline"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
