"""What the demo shows while it runs: a live table on a terminal, one line a step elsewhere, and the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from syncline.engine.config import parse_size

_STAGES = ("h2d", "prepare", "send", "barrier")


class DemoView:
    """The demo's display. Events come in through `event`; nothing here decides anything."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.watermark = parse_size(args.max_tmp_bytes)
        self.console = Console()
        self._live = Live(console=self.console, refresh_per_second=8) if self.console.is_terminal else None
        self._phase = ""
        self._steps: dict[int, dict[str, Any]] = {}
        self._pushes: dict[int, dict[str, Any]] = {}
        self._notes: list[str] = []
        self._answered = self._refused = 0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """What the demo is doing now."""
        self._phase = text
        self._show(text)

    def note(self, text: str) -> None:
        """Something worth a line."""
        self._notes = [*self._notes[-4:], text]
        self._show(text)

    def progress(self, text: str) -> None:
        """Progress within a phase; only on a terminal."""
        self._phase = text
        if self._live is not None:
            self._live.update(self._render())

    def event(self, event: dict[str, Any], clients: Any) -> None:
        """Take in one event of a trainer."""
        self._answered, self._refused = len(clients.answers), clients.refused
        if event["event"] == "step":
            self._phase = "training and pushing"
            self._steps[event["step"]] = event
        elif event["event"] == "push":
            self._pushes[event["step"]] = event
            self._show(self._line(event["step"]))
        elif event["event"] == "failed":
            self.note(f"trainer rank {event['rank']} failed: {event['error']}")
        if self._live is not None:
            self._live.update(self._render())

    def _show(self, line: str) -> None:
        if self._live is None:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            self._live.update(self._render())

    def _line(self, step: int) -> str:
        push = self._pushes[step]
        stages = ", ".join(f"{name} {push['stages'].get(name, 0) * 1e3:.0f}" for name in _STAGES)
        states = " ".join(f"{t['state']}({t['version']})" for t in push["targets"].values())
        return (
            f"step {step:>3}  loss {self._steps[step]['loss']:.3f}  push {push['seconds'] * 1e3:.0f} ms ({stages} ms)  "
            f"temporary {push['peak_tmp_bytes'] / 2**20:.1f} of {self.watermark / 2**20:.0f} MiB  "
            f"{states}  answered {self._answered}"
        )

    def _render(self) -> Group:
        table = Table(box=box.SIMPLE_HEAD, expand=True)
        for column in ("step", "loss", "served", "push", *_STAGES, "temporary", "answered"):
            table.add_column(column, justify="right")
        for step in sorted(self._pushes)[-12:]:
            push = self._pushes[step]
            served = " ".join(str(t["version"]) if t["ok"] else str(t["state"]) for t in push["targets"].values())
            cells = [f"{push['stages'].get(name, 0) * 1e3:.0f} ms" for name in _STAGES]
            peak = f"{push['peak_tmp_bytes'] / 2**20:.1f}/{self.watermark / 2**20:.0f} MiB"
            table.add_row(
                str(step), f"{self._steps[step]['loss']:.3f}", served, f"{push['seconds'] * 1e3:.0f} ms", *cells, peak, ""
            )
        head = Text(f"{self._phase} · answered {self._answered} requests, refused {self._refused}")
        bar = ProgressBar(total=self.args.steps, completed=len(self._pushes))
        title = f"syncline demo · {self.args.model} · {self.args.ranks} ranks → {self.args.engines} engine(s)"
        return Group(Panel(Group(head, bar), title=title), table, Text("\n".join(self._notes), style="yellow"))

    def summary(self, demo: Any, answers: list[Any], proof: Any, out: Path) -> None:
        """What was shown, as figures, and the proof's result."""
        events = demo.events
        pushes = [event for event in events if event["event"] == "push"]
        seconds = sorted(push["seconds"] for push in pushes)
        losses = [event["loss"] for event in events if event["event"] == "step"]
        peak = max(push["peak_tmp_bytes"] for push in pushes)
        spanning = sum(len(answer.versions) > 1 for answer in answers)
        rows = [
            ("pushes", f"{len(pushes)}, {sum(push['ok'] for push in pushes)} complete on every engine"),
            ("seconds a push", f"median {seconds[len(seconds) // 2]:.3f}, worst {seconds[-1]:.3f}"),
            ("bytes a push", f"{max(push['bytes'] for push in pushes) / 1e6:.1f} MB in {pushes[-1]['tasks']} tasks"),
            ("temporary bytes", f"peak {peak / 2**20:.2f} MiB of {self.watermark / 2**20:.0f} MiB"),
            ("loss", f"{losses[0]:.3f} to {losses[-1]:.3f}"),
            ("requests answered", f"{len(answers)} ({spanning} went on over a change of version), {self._refused} refused"),
            ("proof: logits", proof.logits),
            ("proof: answers", proof.answers),
            ("written", f"{out}/trace.json (opens in Perfetto), {out}/push.png, {out}/events.jsonl"),
        ]
        table = Table(title="summary", box=box.SIMPLE_HEAD, show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table)
        for step, failure in demo.failures.items():
            self.console.print(f"{step} missed an engine: {failure[:160]}", style="yellow", highlight=False, markup=False)
        verdict = "every answer is what its version gives" if proof.ok else "THE PROOF FAILED"
        self.console.print(verdict, style="bold green" if proof.ok else "bold red")
