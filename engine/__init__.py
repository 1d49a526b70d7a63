"""The running thing: `TransferEngine` on the source's ranks, `Receiver` on the target's.

>>> engine = TransferEngine(source=..., targets=[RemoteTarget("unix:/run/target.sock")], config=TransferConfig())
>>> await engine.connect()
>>> report = await engine.push(version=1)
"""

from .config import TransferConfig
from .loader import Landed, Loader, Serving
from .receiver import Receiver
from .report import PushReport, StageReport, TargetReport
from .source import Source
from .targets import LeaderAddress, RemoteTarget, Target
from .trace import Trace
from .transfer import PushHandle, TransferEngine

__all__ = [
    "Landed",
    "LeaderAddress",
    "Loader",
    "PushHandle",
    "PushReport",
    "Receiver",
    "RemoteTarget",
    "Serving",
    "Source",
    "StageReport",
    "Target",
    "TargetReport",
    "Trace",
    "TransferConfig",
    "TransferEngine",
]
