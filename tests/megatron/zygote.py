"""The process that the ranks of the tests are forked from: it has imported torch, transformers and Megatron once.

    python zygote.py FD

FD is one end of a SOCK_SEQPACKET pair. A packet in is ``{"role": …, "log": …}`` with one descriptor, the worker's control
socket; a packet out is its pid. Everything dies with the process above it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from pathlib import Path

PR_SET_PDEATHSIG = 1
PRELOADED = (
    "worker",
    "transformers.models.deepseek_v2.modeling_deepseek_v2",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def preload() -> None:
    """Import what workers need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron misses Transformer Engine and Apex, at length
        for name in PRELOADED:
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # workers share these pages for longer


def work(role: str, log: str, control: socket.socket) -> None:
    """The life of one worker; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        import worker

        code = worker.main(role, control)
    except BaseException:  # noqa: BLE001 (the end of the process; its log tells)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent()
    preload()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked from safely"
    control.send(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 2**16, 1)
        if not data:
            return
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            control.close()
            work(request["role"], request["log"], socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])
        control.send(str(pid).encode())


if __name__ == "__main__":
    main()
