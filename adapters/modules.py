"""Walking an ``nn.Module``: which tensors it has, under which names, and where they hang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


class Structure(NamedTuple):
    """What an added, removed or swapped module or tensor changes."""

    sizes: list[tuple[Mapping[str, Any], int]]
    children: list[tuple[Mapping[str, Any], str, Any]]

    def unchanged(self) -> bool:
        """Whether every mapping has as many entries as before, and every submodule hangs where it did."""
        for mapping, size in self.sizes:
            if len(mapping) != size:
                return False
        for mapping, key, child in self.children:  # noqa: SIM110 (runs at every push: a generator takes twice as long)
            if mapping.get(key) is not child:
                return False
        return True


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


def structure(root: Root) -> Structure:
    """Every mapping to which a tensor or module could be added, with its size; every submodule, and where it hangs."""
    if not isinstance(root, nn.Module):
        return Structure([(root, len(root))], [])
    found = Structure([], [])
    for module in root.modules():
        has = members(module)
        found.sizes.extend((mapping, len(mapping)) for mapping in (has.parameters, has.buffers, has.modules))
        found.children.extend((has.modules, key, child) for key, child in has.modules.items())
    return found
