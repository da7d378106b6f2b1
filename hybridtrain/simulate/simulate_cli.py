"""What would it cost? Strategies in virtual time, with as many workers as you like.

    python -m hybridtrain.simulate strategy=hybrid,async workers=8,64,1000 [name=value ...]
    python -m hybridtrain.simulate strategy=hybrid,ssp:lead=2,async task=digits html=page.html

Runs the same policy and server code as a training, on a clock that jumps from event to event, and
prints updates and samples per (virtual) second, the share of the workers' own speed that is left,
how long they wait, and how stale their gradients are; with a task, how the loss falls. The same
seed gives the same figures.

Options (several values: separated by commas, where it says so):
  strategy=NAME,...   strategies, with their options behind colons: hybrid, synchronous,
                      backup:k=3, backup:k=auto, k_async:k=3, k_batch_sync:k=3,
                      k_batch_async:k=3, softsync:n=2, ssp:lead=2, async,
                      switch:first=hybrid:then=async:at_update=100 (default hybrid,async);
                      with task=...: local_sgd:every=32, diloco, easgd, async_diloco, downpour
  workers=N,...       how many workers, those that join later included (default 8)
  batch_size=N        samples in a mini-batch (default 32)
  mini_batches=N      length of the run, in mini-batches of all workers together (default 20000;
                      of a task, its epochs)
  seconds=T           or in virtual seconds; with both, what comes first
  seed=N              of the service times (default 0)

How fast workers are:
  compute=KIND        service time of a mini-batch: constant, exponential (default),
                      shifted_exponential, pareto, lognormal, measured
  compute.mean_s=X    its mean in seconds (default 1)
  compute.shift=X     shifted_exponential: share of the mean that is always needed (default 0.5)
  compute.alpha=X     pareto: exponent of the tail (default 2.5)
  compute.sigma=X     lognormal: standard deviation of the logarithm (default 0.5)
  from=RUN            measured: the directory of a run of python -m hybridtrain, whose record has
                      each worker's times; or a .json file {"0": [seconds, ...], "1": ...}, or a
                      .csv file with the columns worker and seconds. Taken in order, and again
                      from the start
  slower.W=X          worker W takes X times as long (may be given for several workers)
  compute.seconds_per_step=X,...  instead: the mean of each worker's

What is between them and the server, and what happens to them:
  network.latency_s=X         of every message, one way (default 0)
  network.bandwidth=X         bytes per second of each worker's own link, with parameters=N
  network.server_bandwidth=X  bytes per second of the server's link, which all share in turn
  shards=N            parameters in N shards, each with a server of its own that knows nothing of
                      the others; figures are those of shard 0 (default 1)
  delay.S=X           messages of shard S take longer than the latency by X seconds on average,
                      exponentially distributed (may be given for several)
  parameters=N        numbers (4 bytes each) in a contribution, and in what a release brings
  script=FILE.yaml    or the YAML itself: [{worker: 3, dies_at: 10}, {worker: 3, joins_at: 25},
                      {worker: [6, 7], joins_at: 30}, {worker: 1, slower: 4, from: 5, until: 20}]
  interrupt=true      who computes what cannot count any more begins anew at once, as the
                      literature assumes of backup workers (default: notices when it pushes)
  foresight=true      nobody waits for the end of a window in which no one else will come, as the
                      literature on asynchronous DiLoCo assumes (default: all of it)
  data_shards=S data_visit=N  whoever draws takes N mini-batches from one of S shards of the data,
                      then goes to the one visited least (default: all draw from one queue)
  update_s=X          seconds that an update takes the server, which makes one after the other
                      (default 0)

What is trained (default: nothing, only time passes):
  task=NAME           digits, parabola, speech, own ...: as for python -m hybridtrain, and so are
                      model.*, data.*, optimizer.*, experiment= (whose own `simulate` holds
                      options that are not given here; NAME=null leaves one out); of trainer.*
                      max_epochs and the clipping count. One module in one process computes all
                      gradients
  correction=NAME     of late gradients: by_staleness, polynomial:exponent=0.5, dc_asgd,
                      dc_asgd_adaptive, gap_aware
  exchange=NAME       what workers hand over: gradient (default), movement:every=8,
                      accumulated:n_push=4:n_fetch=4 (with strategy=async: Downpour)
  update=NAME         how the masters move: adagrad:lr=0.3, adaptive_revision:lr=0.3, sgd:lr=0.7 ...
                      (default: what goes with the strategy)

What to write:
  json=FILE           the figures
  html=FILE           a page with all of it and drawings, for a browser, that needs nothing else
                      (needs matplotlib, extra `report`)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from hybridtrain.report.page import write
from hybridtrain.simulate.simulate_options import parse
from hybridtrain.simulate.simulate_output import page_of, table
from hybridtrain.simulate.simulations import simulate
from hybridtrain.util.arguments import command


def run(arguments: Sequence[str]) -> None:
    """Simulate every strategy with every number of workers; print and write the figures."""
    plan, files = parse(arguments)
    console = Console()
    rows = []
    with console.status("") as status:
        for workers in plan.workers:
            for way in plan.strategies:
                status.update(f"{way.label}, {workers} workers")
                rows.append(simulate(plan, way, workers))
    console.print(table(rows))
    speeds = sorted(row.events_per_s for row in rows)
    console.print(f"{speeds[0]:,.0f} to {speeds[-1]:,.0f} mini-batches simulated per second")
    if "json" in files:
        text = json.dumps([asdict(row) for row in rows], indent=2)
        write(files["json"], text + "\n", "json")
    if "html" in files:
        write(files["html"], page_of(rows, arguments), "html")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)
