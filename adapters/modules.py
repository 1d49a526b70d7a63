"""Walking an ``nn.Module``: which tensors it has, under which names, and where they hang."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

Root = nn.Module | Mapping[str, torch.Tensor]


class Entry(NamedTuple):
    """A named tensor, and the mapping under whose key it was found."""

    name: str
    container: Mapping[str, Any]
    key: str
    tensor: torch.Tensor


class Members(NamedTuple):
    """The mappings in which a module keeps what was assigned to it, live."""

    parameters: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor | None]
    modules: dict[str, nn.Module | None]
    not_persistent: set[str]


class Structure:
    """What an added, removed or swapped module or tensor changes: where everything hangs, and how many there are."""

    def __init__(self, root: Root, found: Sequence[Entry]) -> None:
        self._mappings: list[Mapping[str, Any]] = []
        self._places: list[tuple[Mapping[str, Any], str]] = [(entry.container, entry.key) for entry in found]
        self._there: list[Any] = [entry.tensor for entry in found]
        for module in root.modules() if isinstance(root, nn.Module) else ():
            has = members(module)
            self._mappings += (has.parameters, has.buffers, has.modules)
            self._places += ((has.modules, key) for key in has.modules)
            self._there += has.modules.values()
        if not isinstance(root, nn.Module):
            self._mappings.append(root)
        self._sizes = [len(mapping) for mapping in self._mappings]

    def unchanged(self) -> bool:
        """Whether everything is there as it was. About 0.5 us a tensor."""
        there = (mapping.get(key) for mapping, key in self._places)
        return all(map(operator.eq, map(len, self._mappings), self._sizes)) and all(map(operator.is_, there, self._there))


def members(module: nn.Module) -> Members:
    """The live mappings of one module; ``named_parameters()`` and the like are copies and too slow for every push."""
    state = vars(module)
    return Members(state["_parameters"], state["_buffers"], state["_modules"], state["_non_persistent_buffers_set"])


def entries(root: Root) -> Iterator[Entry]:
    """Parameters and persistent buffers in the order of ``state_dict``, every name of a tied one; or a dict's tensors."""
    if not isinstance(root, nn.Module):
        for key, value in root.items():
            yield Entry(key, root, key, value)
        return
    for path, module in root.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        has = members(module)
        for container, hidden in ((has.parameters, ()), (has.buffers, has.not_persistent)):
            for key, tensor in container.items():
                if tensor is not None and key not in hidden:
                    yield Entry(prefix + key, container, key, tensor)


def alias(tensor: torch.Tensor, size: Sequence[int], strides: Sequence[int], offset: int, *, inference: bool) -> torch.Tensor:
    """A tensor object of its own over the memory of ``tensor``; ``offset`` counts elements from the storage's first.

    A tensor that was made under ``torch.inference_mode()`` may only be written to there, and may only be pointed (``.data``)
    at another one of its kind. ``inference`` says which kind to make, whatever ``tensor`` is.
    """
    with torch.inference_mode(inference), torch.no_grad():
        blank = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return blank.set_(tensor.untyped_storage(), offset, tuple(size), tuple(strides))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a tensor outside autograd that may be written to."""
    if not tensor.is_inference():
        return tensor.detach()
    return alias(tensor, tensor.shape, tensor.stride(), int(tensor.storage_offset()), inference=False)
