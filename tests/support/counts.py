"""What each strategy counts, measured by real fits with three workers, as a table.

A count is named by what it equals: mini-batches of all workers, updates of the masters, or steps of
the worker that saves. Sizes are such that these differ wherever they can.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers.logger import Logger
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from hybridtrain.engine.policies.registry import STRATEGIES as NAMES

STRATEGIES = tuple(name for name in NAMES if name != "switch")  # it counts as its parts do
PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
WORKERS, BATCHES, EPOCHS, SIZE = 3, 24, 2, 2
MAX_STEPS, SAVE_EVERY = 5, 4
COLUMNS = (
    "`global_step`",
    "a step of a schedule: `interval=step`",
    "`interval=epoch`",
    "by hand, in a mini-batch",
    f"`max_steps={MAX_STEPS}` ends after",
    f"`every_n_train_steps={SAVE_EVERY}` saves at",
    "rows of `log_every_n_steps=1`",
    "steps behind the last exchange, at the end of fit",
)

MINI_BATCH, UPDATE_OF_ALL = "each mini-batch", "each step of all workers together"
UPDATE, OWN_STEP = "each update", "each step of the worker's own"
ENDS = {
    MINI_BATCH: "mini-batches",
    UPDATE_OF_ALL: "steps of all workers together",
    OWN_STEP: "steps of each worker",
}


class Falls(pl.LightningModule):
    """Each step of its optimizer makes every parameter smaller by one."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        self.fallen = torch.nn.ParameterList(torch.zeros(1) for _ in range(3))
        self.own = 0  # mini-batches of this worker; worker 0's come home

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.own += 1
        if self.global_rank == 1:  # the slowest: the others wait for it, where they have to
            time.sleep(0.01)
        loss = torch.cat(list(self.fallen)).sum()
        if self.automatic_optimization:
            self.log("own", float(self.own), batch_size=SIZE)
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()
        return None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        each = ("step",) if not self.automatic_optimization else ("step", "epoch")
        return [optimizer], [
            {"scheduler": LambdaLR(optimizer, _stays), "interval": interval} for interval in each
        ]


def _stays(step: int) -> float:
    return 1.0


class Rows(Logger):
    """Keeps the numbers of rows."""

    name, version = "rows", 0

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "own" in metrics and step is not None:
            self.steps.append(step)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """None."""


@dataclass(frozen=True)
class Facts:
    """What one fit has come to."""

    trainer: pl.Trainer
    module: Falls
    rows: list[int]
    schedules: list[int]
    saved: list[int]

    @property
    def steps(self) -> int:
        return int(self.trainer.global_step)

    def rows_of_worker_0(self) -> str:
        """Which of its mini-batches have a row, where workers run freely."""
        strategy: Any = self.trainer.strategy
        stats, wants = strategy.run_stats(), strategy.requirements
        own = round(stats["samples_per_worker"][0] / SIZE)
        if wants.gathers == 1:
            assert len(self.rows) == own
            return "each mini-batch of worker 0"
        assert len(self.rows) <= min(own, stats["updates"])
        return "those of worker 0, at most one for each update"

    def names(self, count: int, calls: bool = False) -> str:
        """What the count equals; ``calls``: by user code, in its mini-batches."""
        strategy: Any = self.trainer.strategy
        stats, wants = strategy.run_stats(), strategy.requirements
        batches, updates, own = round(stats["samples"] / SIZE), stats["updates"], self.module.own
        if wants.whole_rounds:
            known = {own: OWN_STEP} | ({updates: UPDATE_OF_ALL} if updates == own else {})
        else:
            several = f"{UPDATE}, of {wants.gathers} mini-batches as a rule"
            several = f"{UPDATE}, which is a whole epoch" if wants.evaluates else several
            known = {own: OWN_STEP, updates: UPDATE if wants.gathers == 1 else several}
            known |= (
                {batches: MINI_BATCH} if calls or (updates, wants.gathers) == (batches, 1) else {}
            )
        assert count in known, f"{count} is none of {known}"
        return known[count]


def measured(strategy: str, by_hand: bool = False, batches: int = BATCHES, **options: Any) -> Facts:
    """Fit, and look."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder, rows, module = Path(name), Rows(), Falls(by_hand)
        keep = ModelCheckpoint(folder / "kept", save_top_k=-1, every_n_train_steps=SAVE_EVERY)
        settings: dict[str, Any] = {"max_epochs": EPOCHS} | options
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=WORKERS,
            logger=rows,
            log_every_n_steps=1,
            callbacks=[keep],
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **settings,
        )
        data = TensorDataset(torch.zeros(SIZE * batches, 1))
        trainer.fit(module, DataLoader(data, batch_size=SIZE))
        trainer.save_checkpoint(folder / "home.ckpt")
        home = torch.load(folder / "home.ckpt", weights_only=False)
        saved = [torch.load(p, weights_only=False) for p in (folder / "kept").glob("*.ckpt")]
        schedules = [state["last_epoch"] for state in home["lr_schedulers"]]
        return Facts(trainer, module, rows.steps, schedules, [c["global_step"] for c in saved])


def counted(strategy: str) -> dict[str, str]:
    """The cells that one plain fit gives."""
    facts = measured(strategy)
    by_step, by_epoch = facts.schedules
    whole = all(step % SAVE_EVERY == 0 for step in facts.saved)
    lockstep = facts.trainer.strategy.requirements.whole_rounds  # type: ignore[attr-defined]
    assert whole or not lockstep
    assert facts.rows == sorted(set(facts.rows)) and max(facts.rows) <= facts.steps
    assert not lockstep or len(facts.rows) == facts.steps
    every = "each step" if lockstep else facts.rows_of_worker_0()
    if facts.trainer.strategy.requirements.evaluates:  # type: ignore[attr-defined]
        assert len(facts.rows) == facts.steps - 1
        every = "each update but the last"
    return {
        COLUMNS[0]: facts.names(facts.steps),
        COLUMNS[1]: facts.names(by_step),
        COLUMNS[2]: "each epoch" if by_epoch == EPOCHS else facts.names(by_epoch),
        COLUMNS[5]: "multiples" if lockstep else "worker 0's first step from a multiple on",
        COLUMNS[6]: every,
    }


def by_hand(strategy: str) -> dict[str, str]:
    """The cell of manual optimization."""
    try:
        facts = measured(strategy, by_hand=True)
    except Exception as error:
        assert "automatic_optimization=False" in str(error), error
        return {COLUMNS[3]: "refused"}
    return {COLUMNS[3]: facts.names(facts.schedules[0], calls=True)}


def ended(strategy: str) -> dict[str, str]:
    """The cells of a run that ends by steps, and of one that is too short for an exchange."""
    facts, few = measured(strategy, max_epochs=-1, max_steps=MAX_STEPS), 4 * WORKERS
    unit = facts.names(MAX_STEPS)
    short = measured(strategy, batches=few, max_epochs=1)
    own: Any = short.trainer.strategy.requirements  # type: ignore[attr-defined]
    left = "none: each step is handed over"
    if own.parameters == "own":
        left = "handed over" if all(p.item() < 0 for p in short.module.fallen) else "lost"
    if own.evaluates:
        left = "none: an epoch is one evaluation"
    return {COLUMNS[4]: f"{MAX_STEPS} {ENDS.get(unit, 'updates')}", COLUMNS[7]: left}


def row(strategy: str) -> dict[str, str]:
    """All cells of a strategy."""
    return counted(strategy) | by_hand(strategy) | ended(strategy)


def table(rows: dict[str, dict[str, str]]) -> list[str]:
    """As Markdown."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for strategy, cells in rows.items():
        lines.append(f"| `{strategy}` | {' | '.join(cells[name] for name in COLUMNS)} |")
    return lines


def written(page: str) -> dict[str, dict[str, str]]:
    """The cells of the table on the page."""
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    split = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {
        first.strip("`"): dict(zip(COLUMNS, cells, strict=True))
        for first, *cells in split
        if len(cells) == len(COLUMNS)
    }


def put(page: str, rows: dict[str, dict[str, str]]) -> str:
    """The page with these rows in its table, the others as they are, in the order of STRATEGIES."""
    lines, merged = page.splitlines(), written(page) | rows
    ordered = {strategy: merged[strategy] for strategy in STRATEGIES if strategy in merged}
    heads = [n for n, line in enumerate(lines) if line.startswith(f"| | {COLUMNS[0]} |")]
    begin = heads[0]
    end = next(n for n in range(begin, len(lines)) if not lines[n].startswith("|"))
    return "\n".join([*lines[:begin], *table(ordered), *lines[end:]]) + "\n"
