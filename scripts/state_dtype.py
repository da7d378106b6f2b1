"""Optimizer state as bfloat16: what it costs in loss and in time, as two tables.

    python scripts/state_dtype.py [--seeds 2] [--updates 400] [--parameters 10000000]

The first table has the validation loss of a transformer of 2 layers on the characters of this
repository's pages, with two workers in lock-step: for each optimizer with state as float32 and as
bfloat16, the mean over the seeds and each seed's difference. Both runs of a seed have the same
initial weights and samples in the same order. The second has the time of an update alone, the two
by turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtrain import Server, Worker
from hybridtrain.engine.memory import Layout, Store
from hybridtrain.engine.updates import build_update
from hybridtrain.engine.updates.base import Contribution, StepInput
from hybridtrain.engine.updates.thread_pool import Pool

ROOT = Path(__file__).parents[1]
LENGTH, WIDTH, BATCH, WORKERS = 64, 64, 16, 2  # of a mini-batch's texts; samples of a worker's
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW, beta2 0.999": partial(torch.optim.AdamW, lr=2e-3),
    "AdamW, beta2 0.95": partial(torch.optim.AdamW, lr=2e-3, betas=(0.9, 0.95)),
    "SGD, momentum 0.9": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02),
}


class Characters(nn.Module):
    """A transformer that predicts each next character."""

    def __init__(self, n_characters: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(n_characters, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.ModuleList(layer(norm_first=True) for _ in range(2))
        self.out = nn.Linear(WIDTH, n_characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def loss(self, text: Tensor) -> Tensor:
        """The mean over a batch of texts, (samples, LENGTH + 1)."""
        hidden = self.symbol(text[:, :-1]) + self.place
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return functional.cross_entropy(self.out(hidden).flatten(0, 1), text[:, 1:].flatten())


def learn(worker: Worker) -> None:
    """Push the gradient of each mini-batch."""
    for (text,) in worker.batches():
        worker.model.loss(text).backward()
        worker.push()


def texts() -> tuple[Tensor, int]:
    """Pieces of the pages, (pieces, LENGTH + 1), in a random order, and how many characters are."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    whole = "".join(page.read_text(encoding="utf-8") for page in pages)
    known = {each: number for number, each in enumerate(sorted(set(whole)))}
    flat = torch.tensor([known[each] for each in whole])
    pieces = flat[: len(flat) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    return pieces[order], len(known)


def validation_loss(name: str, dtype: Literal["bf16"] | None, seed: int, updates: int) -> float:
    """Train, and return the loss of what was not trained on."""
    pieces, n_characters = texts()
    held_out, own = pieces[:512], pieces[512:]
    torch.manual_seed(seed)
    model = Characters(n_characters)
    server = Server(model, optimizer=OPTIMIZERS[name], state_dtype=dtype)
    samples = updates * BATCH * WORKERS
    epochs = -(-samples // len(own))
    data = own[: samples // epochs]
    server.run(learn, WORKERS, (data,), batch_size=BATCH, epochs=epochs, seed=seed)
    with torch.no_grad():
        return float(model.loss(held_out))


def losses(seeds: int, updates: int) -> str:
    """The first table."""
    lines = ["| optimizer | float32 | bf16 | difference, by seed |", "| --- | --- | --- | --- |"]
    for name in OPTIMIZERS:
        wide, narrow = (
            [validation_loss(name, dtype, seed, updates) for seed in range(seeds)]
            for dtype in (None, "bf16")
        )
        apart = ", ".join(f"{b - a:+.4f}" for a, b in zip(wide, narrow, strict=True))
        means = f"{statistics.mean(wide):.4f} | {statistics.mean(narrow):.4f}"
        lines.append(f"| {name} | {means} | {apart} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


# ---- an update alone ----------------------------------------------------------------------------


def update_of(parameters: int, dtype: torch.dtype, threads: int) -> Callable[[], None]:
    """An AdamW step of so many parameters, with the gradient of one worker."""
    layout = Layout.of([("weight", torch.empty(parameters, device="meta"))])
    store = Store(layout, 1, private_parameters=False)
    store.gradients[0][torch.float32].normal_()
    weight = nn.Parameter(store.master(layout.slots[0]))
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    update = build_update(optimizer, [0], store, Pool(threads), state_dtype=dtype)
    made = 0

    def step() -> None:
        nonlocal made
        with torch.no_grad():
            update.step(StepInput([Contribution(0, 1.0)], version=made))
        made += 1

    return step


def seconds(
    steps: Sequence[Callable[[], None]], turns: int = 40
) -> list[list[tuple[float, float]]]:
    """Of each step, by turns and without the first: on the clock, and of all cores."""
    found: list[list[tuple[float, float]]] = [[] for _ in steps]
    for _ in range(turns):
        for step, own in zip(steps, found, strict=True):
            began = time.perf_counter(), time.process_time()
            step()
            own.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return [own[1:] for own in found]


def times(parameters: int) -> str:
    """The second table."""
    head = "milliseconds: median (least), CPU"
    lines = [f"| threads | float32, {head} | bf16, {head} |", "| --- | --- | --- |"]
    for threads in (1, 2):
        made = [update_of(parameters, each, threads) for each in (torch.float32, torch.bfloat16)]
        cells = []
        for own in seconds(made):
            clock, cpu = ([1e3 * each for each in column] for column in zip(*own, strict=True))
            middle = statistics.median(clock), min(clock), statistics.median(cpu)
            cells.append("{:.1f} ({:.1f}), {:.1f}".format(*middle))
        lines.append(f"| {threads} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs of each (default 2)")
    parser.add_argument("--updates", type=int, default=400, help="of a run (default 400)")
    parser.add_argument("--parameters", type=int, default=10**7, help="of the update that is timed")
    given = parser.parse_args()
    for name, value in vars(given).items():
        if value < 1:
            parser.error(f"--{name} {value} was given; at least 1 is needed")
    torch.set_num_threads(1)
    print(f"{times(given.parameters)}\n")
    print(losses(given.seeds, given.updates))


if __name__ == "__main__":
    main()
