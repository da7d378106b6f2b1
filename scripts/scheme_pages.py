"""Bring the pages of docs/schemes up to date: tables of knobs, and pictures.

    python scripts/scheme_pages.py [only=async,ssp] [pictures=false]

A page's text is written by hand. Its table is what conf/strategy/NAME.yaml says, values and
comments (a test compares them); its picture is one run in virtual time under the scheme and under
hybrid. Takes two minutes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hybridtrain.errors import UserError  # noqa: E402
from hybridtrain.report.charts import Series  # noqa: E402
from hybridtrain.simulate import SimulationRow, Way, parse, simulate  # noqa: E402
from hybridtrain.updates.delay_tolerant import (  # noqa: E402
    AdaDelay,
    AdaptiveRevision,
    AsyncAdaDA,
)
from hybridtrain.util.arguments import command, options  # noqa: E402

PAGES, ROWS = ROOT / "docs" / "schemes", ROOT / "conf" / "strategy"
BEGIN, END = "<!-- knobs: scripts/scheme_pages.py -->", "<!-- end -->"
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
    "ssp": ["strategy=ssp:lead=3"],
    "switch": ["strategy=switch:first=hybrid:then=async:at_update=200"],
}
LATER = {"name": "movement", "every": {"then": 16, "at": 100}}
WAYS = {"post_local_sgd": Way("post_local_sgd", "hybrid", LATER)}  # what colons cannot say
RUN = (
    *("task=clusters", "data.dimensions=64", "data.clusters=4", "data.noise=0.15"),
    *("data.points=2048", "data.passes=8", "data.batch_size=8", "trainer.max_epochs=1"),
    *("optimizer.lr=0.002", "workers=4", "compute=lognormal", "compute.mean_s=0.1", "slower.3=3"),
    *("network.latency_s=0.005", "network.bandwidth=5e6", "seconds=100"),
)


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
    """What a docstring says of an argument."""
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


def refreshed(text: str, name: str) -> str:
    """A page with its table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{knobs(name)}\n{END}{after}"


# ---- pictures -----------------------------------------------------------------------------------


def run_of(name: str) -> SimulationRow:
    """The run under this scheme; what is given for it counts, not what is usual."""
    arguments = SIMULATED.get(name, [] if name in WAYS else [f"strategy={name}"])
    names = {argument.partition("=")[0] for argument in arguments}
    usual = [each for each in RUN if each.partition("=")[0] not in names]
    plan, _ = parse([*usual, *arguments])
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


def run(arguments: Sequence[str]) -> None:
    given = options(arguments, ["only", "pictures"])
    names = sorted(page.stem for page in PAGES.glob("*.md"))
    only = given.get("only", ",".join(names)).split(",")
    for name in only:
        if name not in names:
            raise UserError(f"only={name} was given; known are {', '.join(names)}")
    hybrid = None
    for name in only:
        page = PAGES / f"{name}.md"
        page.write_text(refreshed(page.read_text(), name))
        if given.get("pictures", "true") == "true" and name != "hybrid":
            hybrid = hybrid or run_of("hybrid")
            own = run_of(name)
            draw(name, own, hybrid, PAGES / f"{name}.png")
            print(f"{name}: {own.loss[-1][1]:.3g} after {own.seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(command(run, __doc__, None))
