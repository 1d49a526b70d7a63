"""What an engine's loader may fill beside parameters and persistent buffers, and how to put it back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..modules import entries, members


class Aside:
    """Buffers that are not persistent, and attributes of modules that are numbers, text or tensors, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {id(entry.tensor) for entry in entries(model)}
        self._places: list[dict[str, Any]] = [
            place for module in model.modules() for place in (vars(module), members(module).buffers)
        ]
        self._before = [{key: value for key, value in place.items() if self._is_plain(value)} for place in self._places]
        self._content = [
            (value, value.detach().clone())
            for before in self._before
            for value in before.values()
            if isinstance(value, torch.Tensor)
        ]

    def _is_plain(self, value: object) -> bool:
        if isinstance(value, torch.Tensor):
            return id(value) not in self._known
        return value is None or isinstance(value, (bool, int, float, complex, str))

    def restore(self) -> None:
        """Everything as it was; what was not there is taken away. Under ``no_grad``."""
        for place, before in zip(self._places, self._before, strict=True):
            for key in [key for key, value in place.items() if key not in before and self._is_plain(value)]:
                del place[key]
            place.update(before)
        for tensor, content in self._content:
            tensor.copy_(content)
