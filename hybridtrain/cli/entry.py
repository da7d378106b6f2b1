"""The command ``hybridtrain``: Hydra around one run, or around the jobs of a sweep.

torch and Lightning are imported only when a run begins, so that ``--help``, completion and errors
about options take no time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hybridtrain.cli import (
    claim,
    config_values,
    explain,
    further_host,
    hydra_config,
    resume,
)
from hybridtrain.cli.commands import COMMANDS, TRAIN, run_command
from hybridtrain.cli.exit_status import FAILED, CommandOutcome, guarded
from hybridtrain.cli.quiet import hush, show_warning
from hybridtrain.cli.sweep import job_launcher, job_process, resumed
from hybridtrain.cli.sweep.fair import FairSweeper
from hybridtrain.cli.sweep.search import OptunaSweeper
from hybridtrain.cli.validation.config_checks import check_config
from hybridtrain.cli.validation.host_checks import check_name, check_text
from hybridtrain.errors import UserError
from hybridtrain.lightning_package import decide_by_configuration, with_present_targets
from hybridtrain.util.files import seen_from_here, short
from hybridtrain.util.option_types import hint
from hybridtrain.util.streams import hold_standard_streams, warnings_shown_by
from hybridtrain.util.versions import check_versions


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process' own) and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == [TRAIN]:
        del given[0]
    elif given and given[0] in COMMANDS:
        return run_command(given[0], given[1:])
    hold_standard_streams()
    job_process.remember_environment()
    hush()
    job_launcher.ROWS.clear()
    job_launcher.LAST_WORDS.clear()
    _reset_ignored_signals()
    overrides: list[str] = []
    with seen_from_here(), warnings_shown_by(show_warning):
        outcome = guarded(lambda: _command(given, overrides), overrides)
        if job_launcher.ROWS:
            outcome = _end_of_sweep(outcome)
    claim.release_all()
    further_host.remove_temporary()
    job_process.report(outcome)
    return outcome.exit


def _command(argv: Sequence[str], overrides: list[str]) -> CommandOutcome:
    """Run one command line; fill in ``overrides``, which explain errors."""
    check_versions("hydra-core")
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        raise UserError("the working directory has been deleted; cd to another one") from None
    check_name(Path(here), "the working directory")
    for each in argv:
        check_text(each, "the argument")
    _check_command(argv)
    if not {"", here}.intersection(sys.path):
        sys.path.insert(0, here)  # the console script: a user's module lies here
    flags, found = _split(list(argv))
    overrides[:] = found
    given = list(hydra_config.MORE_DIRS)
    sweeps = {"-m", "--multirun"} & set(flags)
    found = resumed.expanded(found) if sweeps else resume.expanded(found)
    if given != hydra_config.MORE_DIRS:  # that of the run which goes on
        flags += ["--config-dir", str(hydra_config.MORE_DIRS[0])]
    found = hydra_config.complete_overrides(found)  # each key was there once
    overrides[:] = found
    explain.check_groups(found)
    job_process.FLAGS[:] = [x for x in flags if x not in ("-m", "--multirun")]
    return _hydra_main([*flags, *found])


def _check_command(argv: Sequence[str]) -> None:
    """Refuse a word in the place of a command that is none.

    Raises:
        UserError: naming the commands, and the one that was meant.
    """
    word = argv[0] if argv else ""
    if word.isidentifier():
        raise UserError(
            f"{word!r} was given{hint(word, COMMANDS)}; commands are {', '.join(COMMANDS)}, and "
            "options have the form name=value (--help lists both)"
        )


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Separate flags from overrides, and complete the overrides (for a user's own module)."""
    from hydra._internal.utils import get_args_parser

    known, rest = get_args_parser().parse_known_args(argv)
    hydra_config.MORE_DIRS[:] = [] if known.config_dir is None else [Path(known.config_dir)]
    if missing := [each for each in hydra_config.MORE_DIRS if not each.is_dir()]:
        raise UserError(f"--config-dir {missing[0]}: there is no such folder")
    if any(x in ("-sc", "--shell-completion", "--shell_completion") for x in argv):
        return argv, []
    if unknown := [x for x in rest if x.startswith("-")]:
        raise UserError(f"there is no option {unknown[0]}; --help lists what there is")
    found = {*known.overrides, *(x for x in rest if not x.startswith("-"))}  # flags may come last
    overrides = [x for x in argv if x in found]
    return [x for x in argv if x not in found], hydra_config.complete_overrides(overrides)


def _hydra_main(argv: list[str]) -> CommandOutcome:
    """Let Hydra compose the configuration and run the task, itself or through the launcher."""
    results: list[CommandOutcome] = []

    def task(cfg: DictConfig) -> CommandOutcome:
        # Without Hydra's callbacks the directory is not claimed yet.
        claim.claim_or_refuse(Path(str(cfg.run_dir)), "hydra.run.dir")
        overrides = config_values.overrides_of(HydraConfig.get())
        results.append(guarded(lambda: _run(cfg, overrides), overrides))
        return results[-1]

    hydra_config.register()
    job_launcher.register(job_launcher.ProcessLauncher, OptunaSweeper, FairSweeper)
    saved, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [saved[0], *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    try:
        hydra.main(
            str(hydra_config.conf_dir()), hydra_config.CONFIG_NAME, hydra_config.VERSION_BASE
        )(task)()
    except claim.ClaimRefused as refused:
        raise refused.error from None
    finally:
        sys.argv = saved
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full
    return results[-1] if results else CommandOutcome()


def for_lightning(cfg: DictConfig) -> DictConfig:
    """Decide on Lightning's package by the classes that the configuration names."""
    decide_by_configuration(cfg)
    plain = OmegaConf.to_container(cfg, resolve=False)
    present = with_present_targets(plain)
    return cfg if present == plain else OmegaConf.create(present)


def _run(cfg: DictConfig, overrides: list[str]) -> CommandOutcome:
    """Check the configuration before torch and Lightning are imported, which takes seconds."""
    if HydraConfig.get().sweeper["_target_"] == hydra_config.FAIR["_target_"]:
        raise UserError(f"experiment={hydra_config.COMPARISON} is a sweep: add -m")
    check_config(cfg, overrides)
    cfg = for_lightning(cfg)
    from hybridtrain.cli.run import execute

    return execute(cfg)


def _end_of_sweep(outcome: CommandOutcome) -> CommandOutcome:
    print("\n" + job_launcher.table(job_launcher.ROWS), flush=True)
    done = [row.outcome for row in job_launcher.ROWS if row.outcome.exit == 0]
    if done and all(each.metric is None and each.error is None for each in done):
        print("no metric to compare: name one that the module logs with task.metric=…", flush=True)
    page = job_launcher.leave_page(job_launcher.ROWS, job_launcher.DIRECTORY[0])
    if page is not None:
        print(f"\nside by side: {page}", flush=True)
    for words in job_launcher.LAST_WORDS:
        print(words, flush=True)
    if outcome.exit >= 128:
        again = config_values.resuming(short(job_launcher.DIRECTORY[0]))
        print(f"\nbroken off; to go on: python -m hybridtrain -m {again}", flush=True)
    if outcome.exit == 0 and (failed := len(job_launcher.ROWS) - len(done)):
        return CommandOutcome(FAILED, error=f"{failed} of {len(job_launcher.ROWS)} jobs failed")
    if outcome.exit == 0:
        resumed.finish(job_launcher.DIRECTORY[0])
    return outcome


def _reset_ignored_signals() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, even where the shell ignores it.

    A script's background job inherits "ignore"; torch's workers, which end by SIGINT, would then
    outlive their parent. Who inherits it for SIGCHLD does not learn how a job has ended.
    """
    try:
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGINT, signal.default_int_handler)
    except ValueError:
        pass  # not in the main thread: the embedding program decides
