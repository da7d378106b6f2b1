"""Record the public interface in Python: names, arguments, a fit of the user's."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from pathlib import Path
from pydoc import locate
from typing import Any

import torch

from goldens.calls import ROOT

# Said in messages, or by path in the README: what a policy of one's own is made of.
ELSEWHERE = (
    *(
        "hybridtrain.lightning.replay.replay_fit.replay_fit",
        "hybridtrain.engine.recording.read_record",
    ),
    *("hybridtrain.engine.recording.find_record", "hybridtrain.errors.UserError"),
    *(f"hybridtrain.engine.policies.policy.{name}" for name in ("Policy", "Requirements")),
    *(
        f"hybridtrain.engine.protocol.facts.{name}"
        for name in ("Joined", "Ready", "Pushed", "Waiting", "Left", "Apply", "Release", "Drop")
    ),
)
_NAME = re.compile(r"\bhybridtrain(?:\.[A-Za-z_]\w*)+")


def documented() -> list[str]:
    """The dotted names in README, documentation, configuration and the strategy's docstring."""
    import hybridtrain

    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "conf").rglob("*.yaml")]
    texts = [path.read_text() for path in paths if path.name != "decisions.md"]
    texts.append(hybridtrain.HybridStrategy.__doc__ or "")
    found = {name for text in texts for name in _NAME.findall(text)}
    return sorted(name for name in {*found, *ELSEWHERE} if locate(name) is not None)


def write_names(then: list[str]) -> None:
    """Write whether the names of then still exist, and the arguments of the public ones."""
    from pytorch_lightning.strategies import StrategyRegistry

    import hybridtrain

    content = {
        "names": {name: _kind(locate(name)) for name in then},
        "all": sorted(hybridtrain.__all__),
        "version": hybridtrain.__version__,
        "HybridStrategy": _arguments(hybridtrain.HybridStrategy),
        "StepProfiler": _arguments(hybridtrain.StepProfiler),
        "strategies": {
            name: {"what": _kind(each["strategy"]), "with": repr(each["init_params"])}
            for name, each in StrategyRegistry.items()
            if each["strategy"].__module__.startswith("hybridtrain")
        },
        "members": sorted(
            name
            for name, value in vars(hybridtrain.HybridStrategy).items()
            if not name.startswith("_") and callable(value)
        ),
    }
    Path("names.json").write_text(json.dumps(content))


def _kind(found: Any) -> str:
    if inspect.isclass(found):
        return f"class {found.__name__}"
    return "nothing" if found is None else type(found).__name__


def _arguments(found: Any) -> list[str]:
    """Names, order and defaults; not how they are annotated."""
    given = inspect.signature(found).parameters.values()
    return [f"{x.kind.description} {x.name}={x.default!r}".split("=<class")[0] for x in given]


def train_as_documented() -> None:
    """The README's example with a record, replayed, and a profile."""
    warnings.simplefilter("ignore")
    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringDataModule, BoringModel

    import hybridtrain
    from goldens.trainings import keys_of
    from hybridtrain.engine.recording import find_record, read_record
    from hybridtrain.lightning.replay.replay_fit import replay_fit

    def made(strategy: Any, **more: Any) -> tuple[pl.Trainer, pl.LightningModule]:
        pl.seed_everything(3, verbose=False)
        options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False}
        quiet = {"enable_progress_bar": False, "enable_checkpointing": False}
        return pl.Trainer(strategy=strategy, **options | quiet | more), BoringModel()

    trainer, module = made("hybrid", profiler=hybridtrain.StepProfiler("profile"))
    trainer.fit(module, datamodule=BoringDataModule())
    found: dict[str, Any] = {"stats": keys_of(trainer.strategy.run_stats())}
    found["profile"] = sorted(path.name for path in Path("profile").iterdir())
    found["weights"] = weights(module)
    trainer, module = made(hybridtrain.HybridStrategy("async", record="record"))
    trainer.fit(module, datamodule=BoringDataModule())
    trainer, again = made(hybridtrain.HybridStrategy("async"))
    record = read_record(find_record(Path("record")))
    report = replay_fit(record, trainer, again, datamodule=BoringDataModule())
    found["replay"] = {"equal": report.equal, "updates": report.updates}
    found["the same weights"] = weights(module) == weights(again)
    Path("python.json").write_text(json.dumps(found))


def weights(module: Any) -> dict[str, list[Any]]:
    """As numbers that JSON keeps to the bit."""
    return {name: value.tolist() for name, value in module.state_dict().items()}


def train_with_own_policy() -> None:
    """Wait for both, apply, release: written as a user would."""
    warnings.simplefilter("ignore")
    import pytorch_lightning as pl

    from goldens.tasks import Transformer, Words
    from hybridtrain import HybridStrategy
    from hybridtrain.engine.policies import Apply, Joined, Needs, Pushed, Release, Waiting

    class Both:
        def begin(self, n_workers: int) -> Needs:
            self.n, self.there, self.gone = n_workers, [], set()
            return Needs(whole_rounds=True)

        def on(self, fact: Any) -> Any:
            if isinstance(fact, Joined):
                self.gone.discard(fact.worker)
            elif isinstance(fact, Pushed):
                self.gone.discard(fact.worker)
                self.there.append(fact.worker)
            elif isinstance(fact, Waiting):
                self.gone.add(fact.worker)
            if not self.there or len(self.there) + len(self.gone) < self.n:
                return ()
            workers, self.there = tuple(sorted(self.there)), []
            return (Apply(workers), Release(workers))

    pl.seed_everything(3, verbose=False)
    trainer = pl.Trainer(
        strategy=HybridStrategy(Both()),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    module = Transformer()
    trainer.fit(module, datamodule=Words())
    torch.save(dict(module.state_dict()), "weights.pt")
