"""vLLM as a target. On the trainer's side: `VLLMTarget`. In vLLM's processes: a weight-transfer backend named ``syncline``.

======================  =================================================================================================
``target.py``           `VLLMTarget`: where the leader rank of a vLLM server (or of an ``LLM`` object) listens
``offline.py``          offers vLLM's endpoints for an ``LLM`` or ``AsyncLLM`` of one's own process
``front.py``            calls vLLM's endpoints: pause, start, update, finish, resume
``info.py``             what travels through vLLM's calls to its workers
``rendezvous.py``       where source and workers meet on one host
``versions.py``         which of its interfaces a release of vLLM has
``plugin.py``           registers the backend (entry point ``vllm.general_plugins``)
``backend.py``          the backend: vLLM's ``WeightTransferEngine``, one in each worker
``agent.py``            runs a `syncline.engine.Receiver` beside the worker, on a thread with a loop of its own
``serving.py``          the receiver's say over forward passes: vLLM's pause and resume
``main_thread.py``      hands the loader's calls to the worker's main thread
``loader.py``           the receiver's loader
``bracket.py``          vLLM's layerwise reload: opened, filled, closed, mended after a failure
======================  =================================================================================================

Only ``backend`` and ``bracket`` import vLLM, and only inside its processes.
"""

from __future__ import annotations

from .target import VLLMTarget

__all__ = ["VLLMTarget"]
