"""Which interfaces a release of vLLM has. Newest first; a release outside is refused by name, not tried.

=========  =================================================================================================================
release    what changed for us
=========  =================================================================================================================
0.31       an update may be a list with one entry for each worker (not used); 0.33 moved the endpoints' module
0.27       ``/finish_weight_update`` takes ``weight_version``
0.25       the backend opens and closes the reload bracket itself; ``start`` has an empty body; constructor
           ``(config, vllm_config, device, model)``
0.22       constructor ``(config, parallel_config, model)``; ``receive_weights(update_info, load_weights)``; ``start`` takes
           ``is_checkpoint_format``, and we ask for no bracket
0.21       as 0.22, but the constructor has no model: it is the one that ``load_weights`` is bound to, which is so only if
           ``start`` opens the bracket
0.17-0.20  no ``start`` and ``finish``: a push could not be one bracket. Refused
=========  =================================================================================================================

Run here with 0.32; the other branches follow vLLM's released sources.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.engine.errors import ConfigError

OLDEST, NEWEST = (0, 21), (0, 33)


@dataclass(frozen=True, kw_only=True)
class Interfaces:
    """What a release has.

    Attributes:
        version: the release, as it says itself.
        start_body: JSON body of ``/start_weight_update``; None: an empty one.
        engine_brackets: the backend opens and closes the reload bracket; else vLLM's worker has opened it by ``start``.
        finish_takes_version: ``/finish_weight_update`` takes ``weight_version``.
    """

    version: str
    start_body: dict[str, bool] | None
    engine_brackets: bool
    finish_takes_version: bool


def interfaces(version: str) -> Interfaces:
    """The interfaces of a release.

    Args:
        version: as ``GET /version`` or ``vllm.__version__`` says: ``0.32.0``, ``0.33.1.dev4+g12ab``.

    Raises:
        ConfigError: it is older than what has the three phases, newer than what is known here, or no version at all.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match is None:
        raise ConfigError([f"vLLM says that its version is {version!r}, which is none; releases 0.21 to 0.33 are known"])
    release = int(match[1]), int(match[2])
    if release > NEWEST:
        raise ConfigError([f"vLLM {version} is newer than 0.33, the newest that this adapter knows; update syncline"])
    if release >= (0, 27):
        return Interfaces(version=version, start_body=None, engine_brackets=True, finish_takes_version=True)
    if release >= (0, 25):
        return Interfaces(version=version, start_body=None, engine_brackets=True, finish_takes_version=False)
    if release >= (0, 22):
        body = {"is_checkpoint_format": False}
        return Interfaces(version=version, start_body=body, engine_brackets=True, finish_takes_version=False)
    if release >= OLDEST:
        body = {"is_checkpoint_format": True}
        return Interfaces(version=version, start_body=body, engine_brackets=False, finish_takes_version=False)
    why = f"vLLM {version} cannot take a push as one update: it has no start_weight_update and finish_weight_update"
    raise ConfigError([f"{why}; update it to 0.21 or newer"])
