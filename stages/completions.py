"""Completions: something that says, without blocking, whether started work is done.

Two kinds. *Polled* ones answer `poll()` (CUDA events, collectives: gloo's and NCCL's ``Work.is_completed``). *Signalled*
ones call back into the loop when they end (threads, sockets). The driver's one poller asks the first kind; the second
kind costs nothing until it fires.
"""
