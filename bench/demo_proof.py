"""The demo's proof, computed after the run from weights that never went through syncline.

The trainer left snapshots, gathered with torch's own means. With them, the server's logits equal the trainer's, and each
answer is what its versions give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from torch import nn

from .demo_clients import Answer
from .demo_model import model_dtype

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Logit gap within which two tokens count as a tie: a batch rounds otherwise than a single pass."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proved, in words, and whether all of it held."""

    ok: bool
    logits: str
    answers: str


class Snapshots:
    """Weights by version, from the trainer's snapshots; version 0 is what the servers started from."""

    def __init__(self, work: Path, model: str, seed: int) -> None:
        from syncline.adapters.engines.checkpoints import load_model

        self._work = work
        self.dtype = model_dtype(model)
        self.model = load_model(model, dtype=self.dtype, random_weights=seed + 1)
        self._initial = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def weights(self, version: int) -> Mapping[str, torch.Tensor]:
        from safetensors.torch import load_file

        if version == 0:
            return self._initial
        return load_file(self._work / f"version-{version}.safetensors")

    def module(self, version: int) -> nn.Module:
        """The model with the weights of ``version``."""
        self.model.load_state_dict(dict(self.weights(version)), strict=False)
        return self.model


async def prove(demo: Any, answers: Sequence[Answer], progress: Progress) -> Proof:
    """Compare the servers' logits for the last version, then replay every answer."""
    snapshots = await asyncio.to_thread(Snapshots, demo.work, demo.model, demo.args.seed)
    logits_ok, logits = await _prove_logits(demo, snapshots)
    answers_ok, replayed = await asyncio.to_thread(_prove_answers, snapshots, answers, progress)
    return Proof(ok=logits_ok and answers_ok, logits=logits, answers=replayed)


async def _prove_logits(demo: Any, snapshots: Snapshots) -> tuple[bool, str]:
    version = demo.args.steps
    prompt_ids = demo.tokenizer.encode("The capital of France is")
    with torch.no_grad():
        expected = snapshots.module(version)(input_ids=torch.tensor([prompt_ids])).logits[0].float()
    wrong: list[str] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for server in (server for server in demo.servers if server.has_logits):
            async with session.post(f"{server.http}/logits", json={"prompt_ids": prompt_ids}) as reply:
                reply.raise_for_status()
                answer = await reply.json()
            served = torch.tensor(answer["logits"])
            if answer["version"] != version:
                wrong.append(f"server {server.number} serves version {answer['version']}, not {version}")
            elif not torch.equal(served, expected):
                worst = (served - expected).abs().max().item()
                wrong.append(f"server {server.number} differs by up to {worst:.3g}")
    if wrong:
        return False, "; ".join(wrong)
    if not any(server.has_logits for server in demo.servers):
        return (
            True,
            f"{demo.args.engine} does not give them; the answers below are checked against transformers, token by token",
        )
    shape = "x".join(str(size) for size in expected.shape)
    return True, f"equal bit for bit on {len(demo.servers)} server(s): version {version}, {shape} values"


def _prove_answers(snapshots: Snapshots, answers: Sequence[Answer], progress: Progress) -> tuple[bool, str]:
    from syncline.adapters.engines.replay import Replayer
    from syncline.adapters.engines.requests import Span

    tolerance = _TOLERANCE[snapshots.dtype]
    replayer = Replayer(snapshots.model, snapshots.weights, tolerance=tolerance)
    tokens, worst = 0, 0.0
    ordered = sorted(answers, key=lambda answer: [span["version"] for span in answer.versions])
    for number, answer in enumerate(ordered):
        spans = [Span(version=s["version"], start=s["start"], end=s["end"]) for s in answer.versions]
        report = replayer.check(answer.prompt_ids, answer.token_ids, spans)
        if not report.ok:
            return False, f"an answer of server {answer.server} to {answer.prompt!r}: {report.problem}"
        tokens, worst = tokens + len(answer.token_ids), max(worst, report.worst_gap)
        progress(f"proving · {number + 1} of {len(ordered)} answers replayed")
    versions = {span["version"] for answer in answers for span in answer.versions}
    return bool(answers), (
        f"{len(answers)} answers ({tokens} tokens, {len(versions)} versions) are each what their versions give; "
        f"largest logit gap {worst:.2g} (ties within {tolerance:g})"
    )
