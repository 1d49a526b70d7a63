"""vLLM's layerwise reload around one push, on a worker's main thread.

vLLM holds weights fused, sharded and sometimes repacked. Its layerwise reload takes every layer off its weights, buffers what
comes in until the layer is complete, loads and processes it, and copies the result to where the layer's weights always were.
What it does not do by itself, and is done here:

- One bracket is one push, however many parts its content comes in.
- It keeps references to incoming tensors, which lie in buckets that are used again: those are copied after each part.
- After a failure it leaves layers without weights, and the next bracket would take them and what they had buffered for its
  own. `mend` puts the layers back on the weights that they had; the next push overwrites all of them.
- A layer that got nothing keeps its old weights with no more than a warning: `close` refuses.
- Experts that the CPU backend packs at the first load stay unpacked at later ones: `open` sees to it that they are packed.
- A tied layer gets its weight through another layer, and keeps what it had derived from the old one: `close` derives it anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from syncline.engine.errors import LoaderError


class Bracket:
    """The reload bracket of one model.

    Args:
        model: as the worker holds it.
        model_config: vLLM's, of that model.
        owned: this object opens and closes the bracket; else vLLM's worker does (0.21).
    """

    def __init__(self, model: nn.Module, model_config: Any, *, owned: bool = True) -> None:
        self._model, self._config, self._owned = model, model_config, owned
        self._open = False
        self._copied: dict[int, torch.Tensor] = {}

    def open(self) -> None:
        """Give up the weights that there are."""
        self.mend()
        self._open = True
        self._repack_experts()
        if self._owned:
            initialize_layerwise_reload(self._model)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load whole checkpoint tensors. They may be overwritten once this has returned."""
        model: Any = self._model
        with torch.no_grad():
            model.load_weights(iter(tensors))
            self._keep_what_is_buffered()

    def close(self) -> None:
        """All content has come: process what waits for it, and see that every layer has got its own.

        Raises:
            LoaderError: a layer got nothing, or is left without weights.
        """
        untouched = {path: layer for path, layer in self._waiting() if _got_nothing(layer)}
        finalize_layerwise_reload(self._model, self._config)
        self._open = False
        self._copied.clear()
        self._check_memory()
        self._renew_tied(untouched)

    def mend(self) -> None:
        """After a failure: layers that are not complete go back to the weights that they had, and forget what they buffered."""
        if not self._open:
            return
        for _, layer in self._waiting():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self._model, self._config)
        self._open = False
        self._copied.clear()

    def _repack_experts(self) -> None:
        """Have packed experts packed again: vLLM (0.32) does so at the first load only, and would use unpacked ones."""
        if not current_platform.is_cpu():
            return
        for layer in self._model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None  # makes the next load the first one

    def _waiting(self) -> Iterator[tuple[str, nn.Module]]:
        """Layers that are not complete yet."""
        for path, layer in self._model.named_modules():
            if get_layerwise_info(layer).can_load():
                yield path, layer

    def _keep_what_is_buffered(self) -> None:
        copied: dict[int, torch.Tensor] = {}
        for _, layer in self._waiting():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for name, value in bound.arguments.items():
                    if isinstance(value, torch.Tensor) and not value.is_meta:
                        mine = value if id(value) in self._copied else value.clone()
                        bound.arguments[name] = copied[id(mine)] = mine
        self._copied = copied

    def _check_memory(self) -> None:
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        left = [name for name, tensor in tensors if tensor.is_meta]
        if left:
            raise LoaderError(f"vLLM left {len(left)} tensors without memory: {', '.join(left[:10])}")

    def _renew_tied(self, untouched: dict[str, nn.Module]) -> None:
        """A tied layer shares a weight that was loaded through another one; what it derived from it (packed copies) is old."""
        loaded = {
            parameter.data_ptr()
            for path, layer in self._model.named_modules()
            if path not in untouched
            for parameter in layer.parameters(recurse=False)
        } - {0}
        stale = []
        for path, layer in untouched.items():
            if not all(parameter.data_ptr() in loaded for parameter in layer.parameters(recurse=False)):
                stale.append(path)
                continue
            method: Any = getattr(layer, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(layer)
        if stale:
            raise LoaderError(
                f"{len(stale)} layers of vLLM's model kept their old weights, since no checkpoint tensor was loaded into them: "
                f"{', '.join(stale[:10])}"
            )


def _got_nothing(layer: nn.Module) -> bool:
    """A layer with parameters of its own waits for content, and none has come."""
    info = get_layerwise_info(layer)
    return bool(info.restore_metadata[0]) and info.load_numel <= 0 and not is_deferred_attention_layer(layer)
