"""Keys and values of the requests that are being answered, in rows of one tensor a layer.

A request owns one row. Its tokens lie at positions ``0, 1, ...`` of the row, so nothing is padded on the left and the
rotary position of a token is its index. Rows in use are always the first ones, which makes a batch a view; when a
request leaves, the last row takes its place. What lies beyond a row's length is finite and masked.

Memory grows with what is asked for (rows and positions double) and is given back when no row is in use.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_LENGTH = 64


class Window:
    """Which part of the rows the current forward pass reads and writes. Shared by all layers of a `RowCache`."""

    def __init__(self) -> None:
        self.rows = slice(0, 0)
        self.positions: slice | torch.Tensor = slice(0, 0)
        """One row's new positions, or one new position for each row (int64, on the device)."""
        self.length = 0
        """Positions that attention may look at."""


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, each of shape (rows, heads, positions, head size)."""

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._window = window
        self._room = (0, 0)
        self.stores: list[torch.Tensor] = []
        """Keys and values; empty until the first pass."""

    def reserve(self, rows: int, length: int) -> None:
        """Room for so many rows and positions. What is there stays."""
        self._room = (rows, length)
        self.stores = [_grown(store, rows, length) for store in self.stores]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, length = self._room
        self.stores = [new.new_zeros(rows, new.shape[1], length, new.shape[3]) for new in (key_states, value_states)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values, (rows, heads, new, head size), and return all that the window shows."""
        if not self.stores:
            self.lazy_initialization(key_states, value_states)
        window = self._window
        seen = []
        for store, new in zip(self.stores, (key_states, value_states), strict=True):
            rows = store[window.rows]
            if isinstance(window.positions, slice):
                rows[:, :, window.positions] = new
            else:
                rows[torch.arange(len(rows), device=rows.device), :, window.positions] = new[:, :, 0]
            seen.append(rows[:, :, : window.length])
        return seen[0], seen[1]

    def move(self, source: int, target: int, length: int) -> None:
        """Row ``source`` takes the place of row ``target``; its own place is left zeroed."""
        for store in self.stores:
            if source != target:
                store[target, :, :length] = store[source, :, :length]
                store[target, :, length:] = 0
            store[source] = 0

    def drop(self) -> None:
        self.stores = []

    def get_seq_length(self) -> int:
        return self._window.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.length, 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """Keys and values of all requests that are being answered. Used by one thread.

    Args:
        layers: layers of the model.
        max_rows: most requests at once.
        max_length: most positions of a request.
    """

    def __init__(self, *, layers: int, max_rows: int, max_length: int) -> None:
        self._window = Window()
        self._layers = [RowLayer(self._window) for _ in range(layers)]
        super().__init__(layers=[*self._layers])
        self._limits = (max_rows, max_length)
        self._room = (0, 0)
        self.lengths: list[int] = []
        """Tokens in each row that is in use."""

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(store.nbytes for layer in self._layers for store in layer.stores)

    def open_row(self) -> int:
        """A new, empty row, after the others."""
        self.lengths.append(0)
        return len(self.lengths) - 1

    def extend_row(self, row: int, tokens: int) -> slice:
        """The next forward pass adds this many tokens to one row. Returns their positions."""
        before, after = self.lengths[row], self.lengths[row] + tokens
        self.lengths[row] = after
        self._reserve()
        self._window.rows = slice(row, row + 1)
        self._window.positions = slice(before, after)
        self._window.length = after
        return slice(before, after)

    def extend_rows(self, device: torch.device) -> torch.Tensor:
        """The next forward pass adds one token to each row. Returns their positions: int64, (rows,)."""
        positions = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        self.lengths = [length + 1 for length in self.lengths]
        self._reserve()
        self._window.rows = slice(0, len(self.lengths))
        self._window.positions = positions
        self._window.length = max(self.lengths)
        return positions

    def close_row(self, row: int) -> None:
        """Row ``row`` is free; the last row, if it is another one, takes its place."""
        last = len(self.lengths) - 1
        for layer in self._layers:
            layer.move(last, row, self.lengths[last])
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self.clear()

    def clear(self) -> None:
        """No row is in use any more; the memory is given back."""
        self.lengths = []
        self._room = (0, 0)
        for layer in self._layers:
            layer.drop()

    def _reserve(self) -> None:
        need = (len(self.lengths), max(self.lengths))
        if need[0] <= self._room[0] and need[1] <= self._room[1]:
            return
        rows = _doubled(self._room[0] or 1, need[0], self._limits[0])
        length = _doubled(self._room[1] or _FIRST_LENGTH, need[1], self._limits[1])
        self._room = (rows, length)
        for layer in self._layers:
            layer.reserve(rows, length)


def _doubled(room: int, need: int, limit: int) -> int:
    while room < need:
        room *= 2
    return max(need, min(room, limit))


def _grown(store: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    grown = store.new_zeros(rows, store.shape[1], length, store.shape[3])
    grown[: store.shape[0], :, : store.shape[2]] = store
    return grown
