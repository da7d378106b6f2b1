"""Bring the pages of docs/schemes up to date: tables of knobs, timelines, and pictures.

    python scripts/scheme_pages.py [only=async,ssp] [pictures=false]

A page's text is written by hand. Its table is what conf/strategy/NAME.yaml says, values and
comments; its timeline is what the command below it draws (tests compare both). Its picture of the
loss is one run in virtual time under the scheme and under hybrid; docs/dial.svg shows those runs of
all schemes side by side. Takes two minutes; half of one without pictures of losses.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hybridtrain.cli.commands.simulate_options import parse  # noqa: E402
from hybridtrain.engine.options.schemes import SCHEMES  # noqa: E402
from hybridtrain.engine.server.timeline import Timeline  # noqa: E402
from hybridtrain.engine.updates.delay_tolerant import (  # noqa: E402
    AdaDelay,
    AdaptiveRevision,
    AsyncAdaDA,
)
from hybridtrain.errors import UserError  # noqa: E402
from hybridtrain.report.charts import Series  # noqa: E402
from hybridtrain.report.svg import document, rect, strokes, text  # noqa: E402
from hybridtrain.report.timeline import picture  # noqa: E402
from hybridtrain.util.arguments import command, options  # noqa: E402
from hybridtrain.virtual import SimulationRow, StrategySpec, simulate  # noqa: E402

PAGES, ROWS = ROOT / "docs" / "schemes", ROOT / "conf" / "strategy"
BEGIN, END = "<!-- knobs: scripts/scheme_pages.py -->", "<!-- end -->"
DRAWN = "<!-- timeline: scripts/scheme_pages.py -->"
DIAL = ROOT / "docs" / "dial.svg"
FIGURES = ROOT / "docs" / "dial.json"
UPDATES = {"adaptive_revision": AdaptiveRevision, "adadelay": AdaDelay, "async_ada_da": AsyncAdaDA}

# How a scheme is simulated for its picture; else by its name alone. Where several workers update
# one after the other, the rate is that of one worker by their number.
FEWER_STEPS = "optimizer.lr=0.0005"
SIMULATED: dict[str, list[str]] = {
    "async": ["strategy=async", FEWER_STEPS],
    "async_diloco": ["strategy=async_diloco:every=20"],
    "delay_tolerant": ["strategy=async", "update=adaptive_revision:lr=0.05"],
    "diloco": ["strategy=diloco:every=20"],
    "downpour": ["strategy=downpour:n_push=4:n_fetch=4", FEWER_STEPS],
    "grace": ["strategy=grace:window_s=0.05", FEWER_STEPS],
    "hogwild": ["strategy=hogwild", FEWER_STEPS],
    "k_async": ["strategy=k_async:k=2"],
    "k_batch_sync": ["strategy=k_batch_sync:k=4"],
    "sandblaster": ["strategy=sandblaster", "data.passes=1", "trainer.max_epochs=100"],
    "ssp": ["strategy=ssp:lead=3"],
    "switch": ["strategy=switch:first=hybrid:then=async:at_update=200"],
}
# What the picture of a scheme shows beside it, under hybrid too; the dial is without.
CONDITIONS: dict[str, list[str]] = {"pipe_sgd": ["update_s=0.1"]}
LATER = {"name": "movement", "every": {"then": 16, "at": 100}}
WAYS = {"post_local_sgd": StrategySpec("post_local_sgd", "hybrid", LATER)}  # what colons cannot say
RUN = (
    *("task=clusters", "data.dimensions=64", "data.clusters=4", "data.noise=0.15"),
    *("data.points=2048", "data.passes=8", "data.batch_size=8", "trainer.max_epochs=1"),
    *("optimizer.lr=0.002", "workers=4", "compute=lognormal", "compute.mean_s=0.1", "slower.3=3"),
    *("network.latency_s=0.005", "network.bandwidth=5e6", "seconds=100"),
)

# The command that draws a scheme's timeline; else by the scheme's name alone.
TIMELINES: dict[str, list[str]] = {
    "async_diloco": ["strategy=async_diloco:every=4"],
    "delay_tolerant": ["strategy=async", "update=adaptive_revision:lr=0.05"],
    "diloco": ["strategy=diloco:every=4"],
    "downpour": ["strategy=downpour:n_push=4:n_fetch=4"],
    "easgd": ["strategy=easgd:every=4"],
    "k_async": ["strategy=k_async:k=2"],
    "k_batch_sync": ["strategy=k_batch_sync:k=2"],
    "local_sgd": ["strategy=local_sgd:every=4"],
    "pipe_sgd": ["strategy=pipe_sgd:warm_up=2", "update_s=0.8"],
    "sandblaster": ["strategy=sandblaster", "update=lbfgs", "data.points=32", "data.batch_size=8"],
    "ssp": ["strategy=ssp:lead=2"],
    "streaming_diloco": ["strategy=streaming_diloco:every=6"],
    "switch": ["strategy=switch:first=hybrid:then=async:at_update=2"],
}
EARLY = {"name": "movement", "every": {"then": 4, "at": 2}}
TIMED_WAYS = {"post_local_sgd": StrategySpec("post_local_sgd", "hybrid", EARLY)}
LEARNS = ("task=clusters", "data.passes=4")  # so the epoch does not end in the picture
TIMED = ("workers=4", "slower.3=3", "compute=lognormal", "compute.sigma=0.2")
DIAL_S = 50  # virtual seconds after which losses are compared


# ---- tables -------------------------------------------------------------------------------------


def knobs(name: str) -> str:
    """The table of a scheme's own options: name, default, meaning."""
    rows = _of_updates() if name == "delay_tolerant" else _of_row(name)
    if not rows:
        return "It has no options of its own."
    return "\n".join(["| option | default | meaning |", "| --- | --- | --- |", *rows])


def _of_updates() -> list[str]:
    rows = []
    for name, kind in UPDATES.items():
        for each in list(inspect.signature(kind).parameters.values())[1:]:
            option = f"`strategy.update.{each.name}` of `{name}`"
            rows.append(f"| {option} | `{each.default}` | {_said(kind, each.name)} |")
    return rows


def _said(kind: type, name: str) -> str:
    """Return the sentence on an argument in a docstring."""
    found = re.search(rf"^ +{name}: (.+?)$", kind.__doc__ or "", re.MULTILINE)
    return found[1].rstrip(".") if found else ""


def _of_row(name: str) -> list[str]:
    """From the lines of the YAML file, whose comments are the meanings."""
    rows, path = list[str](), list[str]()
    for line in (ROWS / f"{name}.yaml").read_text().partition("- _self_\n")[2].splitlines():
        if (more := re.match(r" +# (.+)", line)) and rows:
            rows[-1] = f"{rows[-1].removesuffix(' |')} {more[1]} |"
        if not (found := re.match(r"( *)([a-z_]+):(?: +([^#]+?))?(?: +# (.+))?$", line)):
            continue
        path[len(found[1]) // 2 :] = [found[2]]
        if found[3] and found[2] != "name" and (len(path) > 1 or found[2] == "correction"):
            rows.append(f"| `strategy.{'.'.join(path)}` | `{found[3]}` | {found[4] or ''} |")
    return rows


def refreshed(page: str, name: str) -> str:
    """A page with its table and the text of its timeline as they are now."""
    return _between(_between(page, BEGIN, knobs(name)), DRAWN, timeline_text(name))


def _between(page: str, begin: str, content: str) -> str:
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{content}\n{END}{rest.partition(END)[2]}"


# ---- timelines ----------------------------------------------------------------------------------


def timeline_command(name: str) -> list[str]:
    """The arguments of the simulation whose timeline is drawn."""
    own = TIMELINES.get(name, [f"strategy={name}"])
    trains = name in SCHEMES or any(argument.startswith("update=") for argument in own)
    task = LEARNS if trains else ()
    return [*own, *TIMED, *task, f"seconds={24 if name in SCHEMES else 14}"]


def timeline_text(name: str) -> str:
    """Write a page's timeline and the text below it."""
    said = f"`python -m hybridtrain simulate {' '.join(timeline_command(name))} report=timeline`"
    if name in TIMED_WAYS:
        said = f"`scripts/scheme_pages.py`, with {EARLY['every']}"
    shows = f"Timeline of four workers under {name}: computing, waiting, dropped, and updates"
    return f"![{shows}]({name}.svg)\n\nWorker 3 takes three times as long ({said})."


def timeline(name: str) -> str:
    """The SVG file's text."""
    plan, _ = parse(
        timeline_command(name) if name not in TIMED_WAYS else [*TIMED, *LEARNS, "seconds=24"]
    )
    spec, found = TIMED_WAYS.get(name, plan.strategies[0]), Timeline(plan.workers[0])
    simulate(plan, spec, plan.workers[0], found)
    return picture({f"{spec.label}, {plan.workers[0]} workers": found}, "virtual {}")


# ---- pictures -----------------------------------------------------------------------------------


def run_of(name: str, conditions: Sequence[str] = ()) -> SimulationRow:
    """The run under this scheme; what is given for it counts, not what is usual."""
    arguments = SIMULATED.get(name, [] if name in WAYS else [f"strategy={name}"])
    names = {argument.partition("=")[0] for argument in arguments}
    usual = [each for each in RUN if each.partition("=")[0] not in names]
    plan, _ = parse([*usual, *arguments, *conditions])
    return simulate(plan, WAYS.get(name, plan.strategies[0]), plan.workers[0])


def draw(name: str, own: SimulationRow, hybrid: SimulationRow, path: Path) -> None:
    """Loss against virtual time, small."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="virtual seconds", ylabel="training loss", yscale="log")
    for row, label, look in ((hybrid, "hybrid", "0.6"), (own, name, "C0")):
        line = smooth(row.loss)
        axes.plot(line.x, line.y, color=look, linewidth=1.4, label=label)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=90)


def smooth(points: Sequence[tuple[float, float]], width: int = 5) -> Series:
    """Means of neighbours."""
    groups = [points[n : n + width] for n in range(0, len(points) - width + 1, width)]
    means = [[sum(each) / width for each in zip(*group, strict=True)] for group in groups]
    return Series("", [at_s for at_s, _ in means], [loss for _, loss in means])


# ---- the dial -----------------------------------------------------------------------------------

Figures = Mapping[str, Mapping[str, float]]  # by scheme


def figures_of(row: SimulationRow) -> dict[str, float]:
    """Return a run's figures for the dial."""
    line = smooth(row.loss)
    loss = [y for x, y in zip(line.x, line.y, strict=True) if x <= DIAL_S][-1]
    found = {"waits": row.waiting_share, "samples_per_s": row.samples_per_s, "loss": loss}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def dial(figures: Figures) -> str:
    """Schemes from lock-step to free-running, with what they cost and come to."""
    ranked = sorted(figures, key=lambda name: (-figures[name]["waits"], name))
    height = 118 + 20 * len(ranked)
    said = (
        f"{name} waits {figures[name]['waits']:.0%}, {figures[name]['samples_per_s']:.0f} samples "
        f"a second, loss {figures[name]['loss']:.3g}"
        for name in ranked
    )
    parts = [
        *_dial_heads(height),
        *(part for n, name in enumerate(ranked) for part in _dial_row(figures, name, 62 + 20 * n)),
    ]
    return document(480, height, "From lock-step to free-running", "; ".join(said), parts)


def _dial_heads(height: float) -> Iterator[str]:
    yield text("ink bold", 8, 22, "lock-step: all wait for the slowest")
    end = height - 60
    arrow = [(12, 34, 12, end), (8, end - 6, 12, end), (16, end - 6, 12, end)]
    yield strokes("dim", arrow, 1.5)
    yield text("ink bold", 8, end + 18, "free-running: no worker waits")
    for x, head in zip(COLUMNS, ("waits", "samples/s", f"loss at {DIAL_S} s"), strict=True):
        yield text("dim", x, 44, head)
    yield text("dim small", 8, end + 36, "four workers, one of them three times slower;")
    yield text("dim small", 8, end + 51, "real gradients, virtual time (scripts/scheme_pages.py)")


COLUMNS, SAMPLES, LOSS = (146, 250, 372), 72, 56  # where they begin; widths of the other two


def _dial_row(figures: Figures, name: str, y: float) -> Iterator[str]:
    own, (waits, samples, loss) = figures[name], COLUMNS
    length = SAMPLES * own["samples_per_s"] / max(x["samples_per_s"] for x in figures.values())
    losses = [each["loss"] for each in figures.values()]
    place = math.log(own["loss"] / min(losses)) / math.log(max(losses) / min(losses))
    yield text("ink", 24, y, name)
    yield rect("waiting", waits, y - 7, max(60 * own["waits"], 1), 4)
    yield text("dim small", waits + 60 * own["waits"] + 6, y - 1, f"{100 * own['waits']:.0f} %")
    yield rect("computing", samples, y - 11, length, 13)
    yield text("dim small", samples + length + 6, y - 1, f"{own['samples_per_s']:.0f}")
    yield strokes("faint", [(loss, y - 5, loss + LOSS, y - 5)])
    yield rect("ink", loss + LOSS * place - 3, y - 8, 6, 6, ' rx="3"')
    yield text("dim small", loss + LOSS + 8, y - 1, f"{own['loss']:.3g}")


def run(arguments: Sequence[str]) -> None:
    given = options(arguments, ["only", "pictures"])
    names = sorted(page.stem for page in PAGES.glob("*.md"))
    only = given.get("only", ",".join(names)).split(",")
    for name in only:
        if name not in names:
            raise UserError(f"only={name} was given; known are {', '.join(names)}")
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    hybrid = None
    for name in only:
        page = PAGES / f"{name}.md"
        page.write_text(refreshed(page.read_text(), name))
        (PAGES / f"{name}.svg").write_text(timeline(name))
        if given.get("pictures", "true") == "true":
            hybrid = hybrid or run_of("hybrid")
            own = hybrid if name == "hybrid" else run_of(name)
            if name in CONDITIONS:
                shown = [run_of(each, CONDITIONS[name]) for each in (name, "hybrid")]
                draw(name, shown[0], shown[1], PAGES / f"{name}.png")
            elif name != "hybrid":
                draw(name, own, hybrid, PAGES / f"{name}.png")
            if name != "delay_tolerant":  # which is no scheme, but an update
                figures[name] = figures_of(own)
            print(f"{name}: {own.loss[-1][1]:.3g} after {own.seconds:.0f} s")
    if given.get("pictures", "true") == "true":
        FIGURES.write_text(json.dumps(dict(sorted(figures.items())), indent=1) + "\n")
        DIAL.write_text(dial(figures))


if __name__ == "__main__":
    sys.exit(command(run, __doc__, None))
