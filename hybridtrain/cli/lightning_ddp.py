"""``strategy=ddp``: Lightning's DDP, with a start method that fits the machine.

Its ranks end when the process that started them is killed; Lightning's would train on.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from typing import Any, Literal

import torch
from pytorch_lightning.strategies import DDPStrategy

from hybridtrain.cli.sweep.job_process import PARENT
from hybridtrain.engine.worlds.parent_death import bind_loaders, die_with_parent
from hybridtrain.lightning.hooks.trainer_hooks import ProcessLauncher, ScriptLauncher

StartMethod = Literal["popen", "spawn", "fork"]


def lightning_ddp(
    start_method: StartMethod | Literal["auto"] = "auto",
    process_group_backend: str | None = None,
    find_unused_parameters: bool = False,
    **options: Any,
) -> DDPStrategy:
    """Lightning's DDPStrategy, which also takes ``options``.

    ``auto`` forks the ranks where there is no CUDA device: they share the parent's imports, start
    at once and do not parse the command line. A forked process cannot use CUDA once its parent has,
    so with CUDA each rank is the command run again (Lightning's ``popen``).
    """
    if start_method == "auto":
        start_method = "popen" if torch.cuda.is_available() else "fork"
    return BoundDDP(
        start_method=start_method,
        process_group_backend=process_group_backend,
        find_unused_parameters=find_unused_parameters,
        **options,
    )


class BoundDDP(DDPStrategy):
    """A DDPStrategy whose ranks end with the process that started them.

    ``alone``: that process is a rank and was interrupted. The other ranks wait in a collective, so
    it saves its checkpoint without them.
    """

    alone = False

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.alone:
            super().barrier(*args, **kwargs)

    def go_alone(self) -> None:
        """The other ranks end: meet them no more."""
        self.alone = True

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.alone else super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if self.alone else super().reduce(tensor, *args, **kwargs)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            environment, n_ranks = self.cluster_environment, self.num_processes
            self._launcher = _Commands(environment, n_ranks, self.num_nodes)
            self._launcher.strategy = self
        else:
            self._launcher = _Ranks(self, start_method=self._start_method)


class _Ranks(ProcessLauncher):
    """Ranks that are forked or spawned."""

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Launch as Lightning does, but put torch's files of exceptions in a directory apart."""
        with _temporary_files_aside():
            return super().launch(*args, **kwargs)

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        parent = multiprocessing.parent_process()
        die_with_parent(None if parent is None else parent.pid)
        bind_loaders()
        tempfile.tempdir = None  # the user's temporary files stay in the usual directory
        super()._wrapping_function(*args, **kwargs)

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        with _temporary_files_aside():  # Lightning removes its file, but not the folder made for it
            return super()._collect_rank_zero_results(trainer, results)


@contextmanager
def _temporary_files_aside() -> Iterator[None]:
    """Make temporary files in the directory of ``multiprocessing``, which is removed at exit."""
    former, tempfile.tempdir = tempfile.tempdir, get_temp_dir()
    try:
        yield
    finally:
        tempfile.tempdir = former


class _Commands(ScriptLauncher):
    """Ranks that run this command again, bound to their parent by ``job_process.adopt``."""

    strategy: BoundDDP

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Launch as Lightning does; this process is rank 0, and may be interrupted."""
        try:
            return super().launch(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit):
            self.strategy.go_alone()
            raise

    def _call_children_scripts(self) -> None:
        os.environ[PARENT] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[PARENT]
