"""Sizes that no memory has are refused as sizes are, however they are written."""

from __future__ import annotations

import pytest

from syncline.engine import TransferConfig
from syncline.engine.errors import ConfigError


@pytest.mark.parametrize("name", ["max_tmp_bytes", "bucket_bytes"])
@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GiB", f"{2**62}GiB", 2**62 + 1, 10**400])
def test_a_size_without_end_is_refused(name: str, size: int | str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: a size of more than {2**62} bytes"):
        TransferConfig(**{name: size})


def test_the_largest_size_is_one() -> None:
    assert TransferConfig(max_tmp_bytes=2**62).watermark == 2**62
