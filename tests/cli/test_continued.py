"""Logs that a run appends to when it goes on."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pytorch_lightning.loggers import CSVLogger

from hybridtrain.cli.run import begin, continue_logs
from hybridtrain.lightning.failover.leader_failover import keep_rows

ODD = 'a "name", with everything'


def logged(steps: int) -> CSVLogger:
    logger = CSVLogger("logs", name="", version="", flush_logs_every_n_steps=7)
    for step in range(steps):
        logger.log_metrics({ODD: step / 2, "plain": 1.0}, step=step)
    logger.save()
    return logger


def rows() -> list[dict[str, Any]]:
    with Path("logs/metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_logger_goes_on_as_it_was_with_names_that_want_quotes() -> None:
    logged(5)
    again = CSVLogger("logs", name="", version="", flush_logs_every_n_steps=7)
    continue_logs([again], [], 3)
    again.log_metrics({ODD: 9.0, "plain": 2.0}, step=3)
    again.save()
    assert [(row["step"], row[ODD], row["plain"]) for row in rows()] == [
        ("0", "0.0", "1.0"),
        ("1", "0.5", "1.0"),
        ("2", "1.0", "1.0"),
        ("3", "9.0", "2.0"),
    ]


def test_a_validation_that_is_made_again_is_logged_once() -> None:
    """The checkpoint was written between the third step and the validation behind it."""
    first = logged(3)
    first.log_metrics({"val": 7.0, "more": 1.0}, step=2)
    first.save()
    again = CSVLogger("logs", name="", version="")
    continue_logs([again], [], 3)
    again.log_metrics({"val": 8.0}, step=2)
    again.log_metrics({ODD: 9.0}, step=3)
    again.save()
    found = [(row["step"], row[ODD], row["val"], row["more"]) for row in rows()]
    assert found[2:5] == [("2", "1.0", "", ""), ("2", "", "", "1.0"), ("2", "", "8.0", "")]
    assert found[5:] == [("3", "9.0", "", "")]


def test_a_run_that_was_killed_before_it_wrote_rows_logs_those_of_its_rest(tmp_path: Path) -> None:
    logger = CSVLogger("logs", name="", version="")
    continue_logs([logger], [], 3)
    logger.log_metrics({"val": 8.0}, step=2)
    logger.save()
    assert [(row["step"], row["val"]) for row in rows()] == [("2", "8.0")]


def test_a_log_that_cannot_be_read_stays_as_it_is() -> None:
    logged(2)
    file = Path("logs/metrics.csv")
    file.write_text(damaged := file.read_text() + "x" * (csv.field_size_limit() + 1))
    continue_logs([CSVLogger("logs", name="", version="")], [], 1)
    assert file.read_text() == damaged


def test_a_process_that_takes_over_a_csv_log_keeps_column_names_that_need_quotes() -> None:
    logged(2)
    other = CSVLogger("logs", name="", version="")
    keep_rows(other)
    other.log_metrics({ODD: 9.0, "plain": 2.0}, step=2)
    other.save()
    assert [row[ODD] for row in rows()] == ["0.0", "0.5", "9.0"]
    assert rows()[0].keys() == {ODD, "plain", "step"}


def test_a_run_that_begins_in_a_directory_does_not_show_the_counts_of_a_killed_one(
    tmp_path: Path,
) -> None:
    kept = [tmp_path / name for name in ("summary.json", ".run_stats.json")]
    for file in kept:
        file.write_text("{}")
    begin(OmegaConf.create({"run_dir": str(tmp_path), "ckpt": None}))
    assert not any(file.exists() for file in kept)
