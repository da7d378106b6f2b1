"""The profile of a run: ``profile.json`` for programs, a table for people, a timeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hybridtrain.engine.profiling.time_spans import (
    ENCLOSING,
    MEANINGS,
    Phase,
    Track,
    cost_of_span_ns,
)
from hybridtrain.util.files import short, write_whole

FIGURES, TIMELINE = "profile.json", "timeline.json"
_EXCHANGE = (Phase.PUSH, Phase.WAIT, Phase.PULL)
_COLUMN = 16  # most characters of a worker's column
_SHOWN = 11  # and of the first column


@dataclass
class Report:
    """The profile of one run.

    Args:
        workers: track by worker; those of killed workers are missing.
        server: its tracks; none under strategies without a server.
        n_workers: number of workers, killed ones included.
        hosts: the figures of each, if there are several (``RunStatistics.stats``).
    """

    workers: dict[int, Track]
    server: Sequence[Track] = ()
    n_workers: int = 1
    hosts: Sequence[Mapping[str, float]] = ()
    cost_ns: float = field(default_factory=cost_of_span_ns)

    @cached_property
    def phases(self) -> list[Phase]:
        """Phases that took any time, in the order of a step."""
        seen = {phase for track in self.workers.values() for phase in track.phases()}
        return [phase for phase in Phase if phase in seen]

    @property
    def every(self) -> int:
        """The timeline shows one step in this many."""
        return max((track.every for track in [*self.workers.values(), *self.server]), default=1)

    @property
    def measuring(self) -> float:
        """Share of the workers' time that measuring itself took."""
        spans = sum(each.n for track in self.workers.values() for each in track.sums.values())
        seconds = sum(track.seconds for track in self.workers.values())
        return spans * self.cost_ns / 1e9 / seconds if seconds else 0.0

    @cached_property
    def step_s(self) -> float:
        """Mean over the workers, without validations and checkpoints."""
        return self._mean_step_s(lambda phase: phase not in ENCLOSING)

    @cached_property
    def floor_s(self) -> float:
        """Time of a step without any exchange.

        Lightning's loop, data, hooks, forward, backward, and the arithmetic of one update.
        """
        own = self._mean_step_s(lambda phase: phase not in (*ENCLOSING, *_EXCHANGE))
        if any(Phase.UPDATE in track.phases() for track in self.workers.values()):
            return own
        made = [s for t in self.server[:1] for (_, p), s in t.sums.items() if p is Phase.UPDATE]
        return own + sum(each.own_ns / 1e9 / each.n for each in made)

    def _mean_step_s(self, counts: Callable[[Phase], bool]) -> float:
        each = [
            sum(s for phase, s in track.phases().items() if counts(phase)) / max(1, track.n_steps)
            for track in self.workers.values()
        ]
        return mean(each) if each else 0.0

    # ---- files ----------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write ``profile.json`` and ``timeline.json``."""
        (folder / FIGURES).write_text(json.dumps(self.figures(), indent=1) + "\n")
        write_whole(folder / TIMELINE, self._timeline().encode())

    def figures(self) -> dict[str, Any]:
        """Content of ``profile.json``: seconds, and microseconds a step, of phases and spans."""
        return {
            "workers": {str(w): _figures(track) for w, track in sorted(self.workers.items())},
            "server": [_figures(track) for track in self.server],
            "n_workers": self.n_workers,
            **({"hosts": list(self.hosts)} if self.hosts else {}),
            "timeline_every": self.every,
            "measuring_share": round(self.measuring, 4),
            "us_per_step": round(1e6 * self.step_s, 2),
            "floor_us_per_step": round(1e6 * self.floor_s, 2),
            "meanings": {str(phase): text for phase, text in MEANINGS.items()},
        }

    def _timeline(self) -> str:
        """The timeline in the Chrome trace-event format, which Perfetto (ui.perfetto.dev) opens.

        https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: an object
        with ``traceEvents``; complete events (``"ph": "X"``) with begin ``ts`` and duration ``dur``
        in microseconds, in a process ``pid`` and a thread ``tid``, whose names are metadata
        (``"ph": "M"``). Here the server is process 0, with a thread for each track, and worker
        ``w`` is 1 + w.
        """
        tracks = [(0, n, "server", track) for n, track in enumerate(self.server)]
        tracks += [(1 + w, 0, f"worker {w}", track) for w, track in sorted(self.workers.items())]
        begin_ns = min((min(track.begun) for *_, track in tracks if track.begun), default=0)
        about = json.dumps({"every": self.every, "workers": self.n_workers})
        head = f'{{"displayTimeUnit": "ms", "otherData": {about},\n"traceEvents": [\n'
        events = (json.dumps(event, separators=(",", ":")) for event in _events(tracks, begin_ns))
        return head + ",\n".join(events) + "\n]}\n"

    # ---- table ----------------------------------------------------------------------------------

    def show(self, console: Console, folder: Path | None) -> None:
        """Print the table, and the path of the timeline unless ``folder`` is None."""
        console.print(Group(*self._parts(console.width)))
        console.print(Text(self._says(folder)), soft_wrap=True)  # a path can be copied whole

    def _parts(self, width: int) -> list[Any]:
        title = Text("\nWhere the time went: ms a step, share of the worker's time")
        parts: list[Any] = [title, self._of_workers(width)]
        if any(track.sums for track in self.server):
            parts += [Text(""), self._of_server()]
        if self.hosts:
            parts += [Text(""), self._of_hosts()]
        return parts

    def _of_workers(self, width: int) -> Table:
        many = _SHOWN + _COLUMN * len(self.workers) > width
        heads = ["mean", "least", "most"] if many else [f"worker {w}" for w in sorted(self.workers)]
        explained = width - _SHOWN - _COLUMN * len(heads) >= max(map(len, MEANINGS.values())) + 1
        table = _table("", *heads, *([""] if explained else []))
        if explained:
            table.columns[-1].justify = "left"
        for phase in self.phases:
            told = [Text(MEANINGS[phase], style="dim")] if explained else []
            table.add_row(str(phase), *self._row(phase, many), *told)
        table.add_row("together", *self._row(None, many), style="bold")
        table.add_row("steps", *_few([t.n_steps for t in self._tracks], many))
        return table

    @property
    def _tracks(self) -> list[Track]:
        return [track for _, track in sorted(self.workers.items())]

    def _row(self, phase: Phase | None, many: bool) -> list[str]:
        """Milliseconds a step, and percent: of each worker, or of mean, least and most."""
        seconds = [t.seconds if phase is None else t.phases().get(phase, 0.0) for t in self._tracks]
        each = [
            (1e3 * s / max(1, t.n_steps), 100 * s / t.seconds if t.seconds else 0.0)
            for s, t in zip(seconds, self._tracks, strict=True)
        ]
        if many:
            by_share = sorted(each, key=lambda pair: pair[1])
            average = (mean(ms for ms, _ in each), mean(share for _, share in each))
            each = [average, by_share[0], by_share[-1]]
        return [f"{_ms(ms)} {share:4.0f} %" for ms, share in each]

    def _of_server(self) -> Table:
        table = _table("server", "times", "ms each", "longest", "share")
        for track in self.server:
            rows = sorted(track.sums.items(), key=lambda item: -item[1].own_ns)
            for (name, phase), total in rows[:5]:
                share = total.own_ns / 1e9 / self.server[0].seconds if self.server[0].seconds else 0
                own = total.own_ns / 1e6 / total.n
                label = name if track is self.server[0] else track.name
                label = f"{label} (request)" if phase is Phase.SERVE else label
                longest = _ms(total.longest_ns / 1e6)
                table.add_row(label, str(total.n), _ms(own), longest, f"{100 * share:.0f} %")
        return table

    def _of_hosts(self) -> Table:
        """Tabulate what each host sends and receives in an update, in MB and in time."""
        table = _table("host", "MB sent", "ms", "share", "MB received", "ms", "share")
        seconds, updates = self.server[0].seconds, max(1, self.server[0].n_steps)
        for n, host in enumerate(self.hosts):
            cells = []
            for moved, took in (("sent", "sending_s"), ("received", "receiving_s")):
                cells += [f"{host[moved] / 1e6 / updates:.3g}", _ms(1e3 * host[took] / updates)]
                cells.append(f"{100 * host[took] / seconds if seconds else 0:.0f} %")
            table.add_row(str(n), *cells)
        return table

    def _says(self, folder: Path | None) -> str:
        thinned = f"one step in {self.every}, as there is no room for all"
        step, alone = _ms(1e3 * self.step_s), _ms(1e3 * self.floor_s)
        lines = [f"of {step} ms a step, {alone} would be left with nobody to exchange with"]
        lines.append(f"measuring took about {100 * self.measuring:.1f} % of the time")
        if missing := sorted({*range(self.n_workers)} - self.workers.keys()):
            lines.append(f"nothing is known of worker {', '.join(map(str, missing))}")
        shows = "every step" if self.every == 1 else thinned
        if folder is not None:
            where = short(folder / TIMELINE)
            lines.append(f"{where} shows {shows};\nopen it at https://ui.perfetto.dev")
        return "\n".join(lines)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for head in others:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _few(numbers: Sequence[int], many: bool) -> list[str]:
    shown = [round(mean(numbers)), min(numbers), max(numbers)] if many and numbers else numbers
    return [str(number) for number in shown]


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _figures(track: Track) -> dict[str, Any]:
    steps, phases = max(1, track.n_steps), track.phases()
    return {
        "name": track.name,
        "seconds": round(track.seconds, 6),
        "steps": track.n_steps,
        "start_up_seconds": round((track.first_ns - track.made_ns) / 1e9, 6),
        "phases": {
            str(phase): {
                "seconds": round(s, 6),
                "us_per_step": round(1e6 * s / steps, 2),
                "share": round(s / track.seconds, 4) if track.seconds else 0.0,
            }
            for phase, s in phases.items()
        },
        "spans": [
            {
                "name": name,
                "phase": str(phase),
                "times": total.n,
                "own_seconds": round(total.own_ns / 1e9, 6),
                "us_per_step": round(total.own_ns / 1e3 / steps, 2),
                "longest_us": round(total.longest_ns / 1e3, 1),
            }
            for (name, phase), total in sorted(track.sums.items(), key=lambda i: -i[1].own_ns)
        ],
    }


# ---- timeline -----------------------------------------------------------------------------------


def _events(
    tracks: Sequence[tuple[int, int, str, Track]], begin_ns: int
) -> Iterator[dict[str, Any]]:
    for pid, tid, process, track in tracks:
        if tid == 0:
            yield _named("process_name", pid, tid, {"name": process})
            yield _named("process_sort_index", pid, tid, {"sort_index": pid})
        yield _named("thread_name", pid, tid, {"name": track.name})
        step, note = ("version", "worker") if pid == 0 else ("step", "version")
        for kind, begun, ended, at, noted in zip(*track.columns, strict=True):
            name, phase = track.kinds[kind]
            yield {
                "name": name,
                "cat": str(phase),
                "ph": "X",
                "ts": (begun - begin_ns) / 1e3,
                "dur": (ended - begun) / 1e3,
                "pid": pid,
                "tid": tid,
                "args": {step: at, note: noted},
            }


def _named(what: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
