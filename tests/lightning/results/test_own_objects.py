"""What the caller has made and handed over has, behind a call, what the call has made of it."""

from __future__ import annotations

import itertools
import random
import warnings
from array import array
from collections import ChainMap, Counter, deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import CombinedLoader
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hybridtrain import HybridStrategy
from hybridtrain.lightning.states import held_objects
from tests.lightning.spawnable import adam
from tests.lightning.toys import Regression, make_trainer, regression_data
from tests.picking import but_slow, by_default

STRATEGIES = ("hybrid", "async", "synchronous", "hogwild", "local_sgd", "downpour")
STRATEGY = pytest.mark.parametrize("strategy", by_default(STRATEGIES, "hybrid"))
EQUAL = tuple(each for each in STRATEGIES if each != "downpour")  # with one worker, to one device
ALIKE = pytest.mark.parametrize("strategy", by_default(EQUAL, "hybrid"))


def run(strategy: Any, module: Any, *calls: str, workers: int = 1, **options: Any) -> pl.Trainer:
    """Call methods of a trainer of one epoch, each with the same data."""
    batch_size = options.pop("batch_size", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            made = strategy if isinstance(strategy, str) else strategy()
            trainer = make_trainer(made, workers, max_epochs=1, **options)
            getattr(trainer, call)(module, DataLoader(regression_data(24), batch_size))
    return trainer


def alike(mine: Any, theirs: Any) -> bool:
    """Whether two nested results are equal, numbers to rounding."""
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(alike(mine[k], theirs[k]) for k in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    if isinstance(mine, torch.Tensor):
        return torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    if isinstance(mine, float):
        return mine == pytest.approx(theirs, rel=1e-4)
    return bool(mine == theirs)


# ---- optimizers and schedules -------------------------------------------------------------------


class Given(Regression):
    """Returns an optimizer and a schedule that it was given, by way of ``hands_over``."""

    def __init__(self, hands_over: str, kind: Any = torch.optim.SGD, **options: Any) -> None:
        super().__init__(adam)  # which can be sent
        options = options or {"momentum": 0.9}
        parameters = self.net[2] if hands_over == "with fewer groups" else self.net
        optimizer = kind(parameters.parameters(), lr=0.01, **options)
        schedule = ExponentialLR(optimizer, 0.9)
        if hands_over == "in a closure":
            self.get = lambda: (optimizer, schedule)
        elif hands_over == "in a list":
            self.given = [optimizer, schedule]
            self.get = lambda: tuple(self.given)
        else:
            self.optimizer, self.schedule = optimizer, schedule
            self.get = lambda: (self.optimizer, self.schedule)
        self.grows = hands_over == "with fewer groups"

    def configure_optimizers(self) -> Any:
        optimizer, schedule = self.get()
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        (optimizer,) = self.trainer.optimizers
        if self.grows and batch_idx == 2 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 0.02})


class Refusing(Given):
    """Its hook works in a worker only."""

    def configure_optimizers(self) -> Any:
        if vars(self.trainer.strategy).get("_client", self) is None:
            raise LookupError("only in a worker")
        return super().configure_optimizers()


class Kept(Regression):
    """Keeps what its hook makes."""

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        self.schedule = ExponentialLR(self.optimizer, 0.9)
        return [self.optimizer], [self.schedule]

    def get(self) -> Any:
        return self.optimizer, self.schedule


class ByHand(Given):
    """Manual optimization."""

    def __init__(self, hands_over: str) -> None:
        super().__init__(hands_over)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


MODULES: dict[str, Callable[[], Any]] = {
    "an attribute": lambda: Given("as attributes"),
    "a list": lambda: Given("in a list"),
    "a closure": lambda: Given("in a closure"),
    "Adam": lambda: Given("as attributes", torch.optim.Adam, eps=1e-6),
    "groups added in training": lambda: Given("with fewer groups"),
    "manual optimization": lambda: ByHand("as attributes"),
    "a hook for workers only": lambda: Refusing("as attributes"),
    "made in the hook": Kept,
}


class Around(torch.optim.Optimizer):
    """An optimizer around another one, with its groups and state."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base = base
        self.share()

    def share(self) -> None:
        self.param_groups, self.state = self.base.param_groups, self.base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)
        self.share()


class Wrapped(Given):
    """An optimizer around the one that it was given."""

    def __init__(self, hands_over: str) -> None:
        super().__init__(hands_over)
        self.around = Around(self.optimizer)
        self.schedule = ExponentialLR(self.around, 0.9)
        self.get = lambda: (self.around, self.schedule)


def test_an_optimizer_around_another_one_still_shares_its_state_and_groups() -> None:
    make = partial(Wrapped, "as attributes")
    assert alike(after("hybrid", make, 2), after("auto", make, 2))
    module = make()
    run("hybrid", module, "fit")
    assert module.around.param_groups is module.optimizer.param_groups
    assert module.around.state is module.optimizer.state


def held(optimizer: Any, schedule: Any) -> Any:
    rates = [group["lr"] for group in optimizer.param_groups]
    return deepcopy((optimizer.state_dict(), rates, schedule.state_dict()))


def after(strategy: Any, make: Callable[[], Any], n_fits: int, **options: Any) -> Any:
    """Behind each of some trainings: what optimizer and schedule hold, and the weights."""
    pl.seed_everything(3, verbose=False)
    module, found = make(), []
    for _ in range(n_fits):
        trainer = run(strategy, module, "fit", **options)
        optimizer, schedule = module.get()
        found.append((held(optimizer, schedule), module.net[2].weight.detach().clone()))
        if not isinstance(module, Refusing):
            assert trainer.optimizers[0] is optimizer
            assert alike(held(optimizer, schedule), found[-1][0])
    return found


REFUSED = {("local_sgd", kind) for kind in ("manual optimization", "groups added in training")}
ACCEPTED = [case for case in itertools.product(EQUAL, MODULES) if case not in REFUSED]


@pytest.mark.parametrize(
    ("strategy", "kind"), but_slow(ACCEPTED, lambda case, _: case[0] != "hybrid")
)
def test_optimizers_of_the_caller_have_the_state_and_rates_of_one_device(
    strategy: str, kind: str
) -> None:
    """And a second training goes on with them."""
    assert alike(after(strategy, MODULES[kind], 2), after("auto", MODULES[kind], 2))


def test_two_workers_leave_in_an_optimizer_what_one_device_leaves_with_twice_the_mini_batch() -> (
    None
):
    make = MODULES["an attribute"]
    two = after(partial(HybridStrategy, "hybrid", keep_order=True), make, 2, workers=2)
    assert alike(two, after("auto", make, 2, batch_size=8))


@pytest.mark.parametrize("strategy", by_default(STRATEGIES, "async", "local_sgd"))
def test_several_workers_leave_state_and_rates_in_the_callers_optimizer(strategy: str) -> None:
    module = Given("as attributes")
    optimizer, schedule = module.get()
    (group,), states = optimizer.param_groups, optimizer.state
    run(strategy, module, "fit", workers=2)
    buffer = states[module.net[0].weight]["momentum_buffer"]
    before = buffer.clone()
    trainer = run(strategy, module, "fit", workers=2)
    assert optimizer.param_groups[0] is group and optimizer.state is states
    assert states[module.net[0].weight]["momentum_buffer"] is buffer
    assert not torch.equal(buffer, before) and len(states) == 4
    assert all(each["momentum_buffer"].abs().sum() > 0 for each in states.values())
    assert group["lr"] == pytest.approx(0.01 * 0.9 ** (2 * trainer.global_step))
    assert schedule.last_epoch == 2 * trainer.global_step


def test_a_checkpoint_of_the_calling_process_has_what_its_optimizer_has_now(
    tmp_path: Path,
) -> None:
    module = Given("as attributes")
    trainer = run("hybrid", module, "fit")
    for group in module.optimizer.param_groups:
        group["lr"] = 0.5
    trainer.save_checkpoint(tmp_path / "now.ckpt")
    (saved,) = torch.load(tmp_path / "now.ckpt", weights_only=True)["optimizer_states"]
    assert saved["param_groups"][0]["lr"] == 0.5 and len(saved["state"]) == 4


class SteppedByHooks(Regression):
    """Schedules that Lightning does not know, and one that waits for a plateau."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        self.by_hand = LambdaLR(self.optimizer, lambda epoch: 0.5**epoch)
        self.plateau = ReduceLROnPlateau(self.optimizer, patience=0, threshold=10.0, factor=0.5)

    def configure_optimizers(self) -> Any:
        monitored = {"scheduler": self.plateau, "monitor": "train/loss"}
        return {"optimizer": self.optimizer, "lr_scheduler": monitored}

    def on_train_epoch_end(self) -> None:
        self.by_hand.step()

    def left(self) -> Any:
        known = self.by_hand.last_epoch, self.plateau.num_bad_epochs, self.plateau.last_epoch
        return (*known, self.optimizer.param_groups[0]["lr"])


@STRATEGY
def test_schedules_of_the_caller_are_where_training_has_left_them(strategy: str) -> None:
    found = []
    for each in (strategy, "auto"):
        module = SteppedByHooks()
        run(each, module, "fit", "fit")
        found.append(module.left())
    assert alike(*found)


# ---- averages, metrics, objects of own classes --------------------------------------------------


class Shadow:
    """An average of one's own: no module, no ``state_dict``."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.net = net
        self.values = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.of = {"first": list(self.values.values())[:1]}
        self.count = 0

    def update(self) -> None:
        self.count += 1
        for name, parameter in self.net.named_parameters():
            self.values[name].data.lerp_(parameter.detach(), 0.1)

    def left(self) -> Any:
        return self.values, self.count


class Stateful(Shadow):
    """Another one, with ``state_dict``."""

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.count = state["values"], state["count"]


class Torchs(AveragedModel):
    def update(self) -> None:
        self.update_parameters(self.of[0])

    def left(self) -> Any:
        return dict(self.named_parameters()), int(self.n_averaged)


class InPublic(Regression):
    """The module has the average in an attribute, or in a list, in which torch does not see it."""

    def __init__(self, average: Any, hidden: bool) -> None:
        super().__init__()
        average = average(self.net)
        if isinstance(average, torch.nn.Module):
            average.__dict__["of"] = [self.net]
        self.average = [average] if hidden else average
        self.averages = [average] if hidden else [self.average]

    def on_train_batch_end(self, *_: Any) -> None:
        self.averages[0].update()


class Averaging(pl.Callback):
    """A callback has it."""

    def __init__(self, average: Any) -> None:
        self.average = average

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()


@pytest.mark.parametrize("kind", [Shadow, Stateful, Torchs], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("where", ["attribute", "list", "callback"])
@ALIKE
def test_averages_of_the_caller_are_those_of_one_device(
    strategy: str, where: str, kind: Any
) -> None:
    found = []
    for each in (strategy, "auto"):
        pl.seed_everything(3, verbose=False)
        if where == "callback":
            module: Any = Regression()
            average = kind(module.net)
            if isinstance(average, torch.nn.Module):
                average.__dict__["of"] = [module.net]
            run(each, module, "fit", "fit", callbacks=[Averaging(average)])
        else:
            module = InPublic(kind, where == "list")
            average = module.averages[0]
            run(each, module, "fit", "fit")
            assert module.averages[0] is average
        if kind is Shadow:
            assert average.of["first"][0] is average.values["0.weight"]
            assert average.net is module.net
        found.append(average.left())
    assert alike(*found)


class Measuring(Regression):
    """Metric objects in layers, and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()

    def measure(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(batch[1].mean())
        self.all.update(batch[1][0])

    validation_step = test_step = predict_step = measure

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.measure(batch, batch_idx)
        return super().training_step(batch, batch_idx)


class MeasuringCallback(pl.Callback):
    def __init__(self) -> None:
        self.sums = {"x": torchmetrics.SumMetric()}

    def add(self, *_: Any) -> None:
        self.sums["x"].update(1)

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = add


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
@STRATEGY
def test_metric_objects_can_be_computed_as_on_one_device(strategy: str, call: str) -> None:
    found = []
    for each in (strategy, "auto"):
        module, callback, seen = Measuring(), MeasuringCallback(), []
        for _ in range(2):
            run(each, module, call, callbacks=[callback], num_sanity_val_steps=0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a metric that was not updated
                metrics = module.mean, module.all, callback.sums["x"]
                seen.append([metric.compute().clone() for metric in metrics])
        found.append(seen)
    assert alike(*found)


class Belongs:
    """Of the user's own; what it holds is held elsewhere, too."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.tensor, self.array = torch.zeros(2), np.zeros(2)
        self.nested = {"a": [0], "b": {"c": {1}}}
        self.counted: Counter[str] = Counter()
        self.n_steps, self.last = 0, None


class Noting(pl.Callback):
    def __init__(self, belongs: Belongs) -> None:
        self.belongs, self.also, self.file = belongs, [belongs.steps], None

    def note(self, trainer: Any, *_: Any) -> None:
        mine = self.belongs
        mine.n_steps += 1
        for each in (self.also[0], mine.recent):
            each.append(mine.n_steps)
        mine.tensor += 1
        mine.array += 1
        mine.nested["a"][0] += 1
        mine.nested["b"]["c"].add(mine.n_steps)
        mine.counted["steps"] += 1
        mine.last = [mine.steps]

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = note


class Predicting(Regression):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])


CALLS = ["fit", "validate", "test", "predict"]


@pytest.mark.parametrize("workers", by_default([1, 2], 1, 2))
@pytest.mark.parametrize("call", CALLS)
@STRATEGY
def test_what_objects_of_own_classes_hold_is_in_the_very_objects(
    strategy: str, call: str, workers: int
) -> None:
    belongs = Belongs()
    steps, tensor, array, inner = belongs.steps, belongs.tensor, belongs.array, belongs.nested["a"]
    callback = Noting(belongs)
    run(strategy, Predicting(), call, call, workers=workers, callbacks=[callback])
    n = belongs.n_steps
    assert n >= 12 // workers
    assert steps == [*range(1, n + 1)] and belongs.recent == deque([n - 1, n], maxlen=2)
    assert tensor.tolist() == array.tolist() == [n, n] and inner == [n]
    assert belongs.nested["b"]["c"] == {*range(1, n + 1)} and belongs.counted["steps"] == n
    assert belongs.steps is steps and belongs.last[0] is steps and callback.also[0] is steps
    assert belongs.tensor is tensor and belongs.array is array and belongs.nested["a"] is inner


@dataclass
class Step:
    number: int
    of: list[int]


class Pair(NamedTuple):
    number: int
    of: list[int]


class Recording(pl.Callback):
    """Makes records in training; another callback is inside."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.steps: list[Any] = []
        self.inner: Any = None

    def on_train_batch_end(self, *_: Any) -> None:
        self.numbers.append(len(self.numbers))
        self.steps += [Step(len(self.numbers), self.numbers), Pair(len(self.numbers), self.numbers)]
        if self.inner is not None:
            self.inner.on_train_batch_end()


@STRATEGY
def test_records_of_own_classes_that_training_makes_come_home(strategy: str) -> None:
    callback = Recording()
    callback.inner = Recording()
    run(strategy, Regression(), "fit", callbacks=[callback])
    for each in (callback, callback.inner):
        numbers = each.numbers
        assert len(numbers) == 6 and len(each.steps) == 12
        assert each.steps[:2] == [Step(1, numbers), Pair(1, numbers)]
        assert all(step.of is numbers for step in each.steps)


class Node:
    """Holds itself, by way of another."""

    def __init__(self) -> None:
        self.other: Any = None


class Cyclic(pl.Callback):
    def __init__(self) -> None:
        self.node, self.made = Node(), None
        self.node.other = [self.node, self]
        self.n = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.n += 1
        self.node.n = self.n
        self.made = Node()
        self.made.other = [self.made]


def test_objects_that_hold_themselves_come_home_or_stay() -> None:
    callback = Cyclic()
    node = callback.node
    run("hybrid", Regression(), "fit", callbacks=[callback])
    assert callback.node is node and callback.n == node.n == 6 and callback.made is None


class Restoring(pl.Callback):
    """Puts a copy in the place of its list when its state is loaded."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


@STRATEGY
def test_a_callback_keeps_its_own_list_where_its_state_has_a_copy(strategy: str) -> None:
    seen: list[int] = []
    callback = Restoring(seen)
    run(strategy, Regression(), "fit", "fit", callbacks=[callback])
    assert callback.seen is seen and len(seen) == 12


class Rows(Logger):
    """A logger of one's own, with a list of the caller."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__()
        self.rows = rows

    name, version = "rows", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@STRATEGY
def test_a_logger_of_ones_own_has_its_rows(strategy: str) -> None:
    rows: list[Any] = []
    run(strategy, Regression(), "fit", "test", logger=Rows(rows), log_every_n_steps=2)
    assert [step for step, _ in rows][:3] == [1, 3, 5]
    assert "val/loss" in rows[-1][1] and len(rows) == 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_workers_fill_the_callers_objects_too(method: str) -> None:
    belongs = Belongs()
    steps, module = belongs.steps, Given("in a list", torch.optim.SGD, momentum=0.9)
    del module.get  # a lambda cannot be sent
    module.__class__ = Listed
    made = partial(HybridStrategy, "hybrid", start_method=method)
    trainer = run(made, module, "fit", workers=2, callbacks=[Noting(belongs)])
    assert steps == [1, 2, 3] and belongs.last[0] is steps
    assert trainer.optimizers[0] is module.given[0] and len(module.given[0].state) == 4


class Listed(Given):
    def get(self) -> Any:
        return tuple(self.given)


# ---- random number generators, containers beside lists and dictionaries --------------------------


class Own(random.Random):
    """A class of the user's own, with a count."""

    n = 0

    def random(self) -> float:
        self.n += 1
        return super().random()


class Drawing(Regression):
    """It draws from generators that it holds, and from one that training makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.legacy = np.random.default_rng(0), np.random.RandomState(0)
        self.bits, self.dice = np.random.MT19937(0), random.Random(0)
        self.inside: Any = {"torch": [torch.Generator().manual_seed(0)], "own": Own(0)}
        self.system, self.made = random.SystemRandom(), None
        self.drawn: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.made = self.made or np.random.default_rng(1)
        (torchs,) = self.inside["torch"]
        self.drawn.append(
            [
                *(each.random() for each in (self.numpy, self.dice, self.inside["own"], self.made)),
                self.legacy.standard_normal(),
                int(self.bits.random_raw()),
                float(torch.rand(1, generator=torchs)),
            ]
        )


class DrawingCallback(pl.Callback):
    """The same of a callback, by the objects of the module or its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)
        self.drawn: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.drawn.append(self.generator.random())


@STRATEGY
def test_random_number_generators_go_on_in_the_next_training_as_on_one_device(
    strategy: str,
) -> None:
    found = []
    for each in (strategy, "auto"):
        module, callback = Drawing(), DrawingCallback()
        held = module.numpy, module.legacy, module.bits, module.dice, *module.inside["torch"]
        generator = callback.generator
        run(each, module, "fit", "fit", callbacks=[callback])
        assert callback.generator is generator and module.inside["own"].n == 12
        assert (module.numpy, module.legacy, module.bits, module.dice) == held[:4]
        assert module.inside["torch"][0] is held[4]
        found.append((module.drawn, callback.drawn, generator.random()))
    assert found[0] == found[1] and len(found[0][1]) == 12


def test_generators_of_the_caller_have_the_state_of_the_first_of_several_workers() -> None:
    module = Drawing()
    run("hybrid", module, "fit", "fit", workers=2)
    known, generator = Drawing(), random.Random(0)
    assert [drawn[1] for drawn in module.drawn] == [generator.random() for _ in range(6)]
    assert module.dice.getstate() == generator.getstate() != known.dice.getstate()


class Containing(pl.Callback):
    """Containers of the standard library and numpy, which the caller holds, too."""

    def __init__(self) -> None:
        self.bytes, self.array = bytearray(), array("d", [0.0])
        self.chain = ChainMap[str, Any]({}, {"below": [0]})
        self.objects = np.array([[], {"a": []}, None], dtype=object)
        self.made: Any = None

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes.append(1)
        self.array[0] += 1
        self.chain["n"] = self.chain.get("n", 0) + 1
        self.chain["below"].append(self.chain["n"])
        self.objects[0].append(1)
        self.objects[1]["a"].append(self.objects[0])
        self.objects[2] = self.chain["n"]
        self.made = [ChainMap({"n": self.bytes}), bytearray(b"x"), self.objects.copy()]


@STRATEGY
def test_byte_arrays_chained_dictionaries_and_arrays_of_objects_come_home_in_place(
    strategy: str,
) -> None:
    callback = Containing()
    held = dict(vars(callback))
    first, inner, below = callback.objects[0], callback.objects[1]["a"], callback.chain.maps[1]
    run(strategy, Regression(), "fit", "fit", callbacks=[callback])
    n = 12
    assert all(vars(callback)[name] is each for name, each in held.items() if name != "made")
    assert callback.bytes == bytearray(b"\1" * n) and callback.array.tolist() == [n]
    assert callback.chain.maps[1] is below and below == {"below": [*range(n + 1)]}
    assert callback.chain["n"] == callback.objects[2] == n
    assert callback.objects[0] is first and first == [1] * n and len(inner) == n
    assert inner[0] is first and callback.objects[1]["a"] is inner
    assert callback.made[0]["n"] is callback.bytes and callback.made[1] == b"x"
    assert callback.made[2][0] is first


class Shuffling(Sampler[int]):
    """A sampler of the user's own, with a generator of numpy."""

    def __init__(self) -> None:
        self.dice = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.dice.permutation(24).tolist())

    def __len__(self) -> int:
        return 24


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "weighted": lambda: {"sampler": WeightedRandomSampler([1, 2] * 12, 24, generator=seeded())},
    "of a part": lambda: {"sampler": SubsetRandomSampler(range(24), generator=seeded())},
    "own": lambda: {"sampler": Shuffling()},
    "shuffled": lambda: {"shuffle": True, "generator": seeded()},
}


class Seeing(Regression):
    """Notes what it is trained on, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch[1].flatten().tolist()
        return super().training_step(batch, batch_idx)


def seen_in_two_trainings(strategy: str, kind: str, workers: int = 1, **options: Any) -> Any:
    module, loader = Seeing(), DataLoader(regression_data(24), 4, **SAMPLERS[kind]())
    for _ in range(2):
        trainer = make_trainer(strategy, workers, max_epochs=1, **options)
        trainer.fit(module, CombinedLoader(loader) if kind == "own" else loader)
    half = len(module.seen) // 2
    return module.seen[:half], module.seen[half:]


@pytest.mark.parametrize("kind", SAMPLERS)
@STRATEGY
def test_the_order_of_a_loader_with_a_generator_goes_on_in_the_next_training_as_on_one_device(
    strategy: str, kind: str
) -> None:
    options = {"use_distributed_sampler": kind != "shuffled"}
    seen = [seen_in_two_trainings(each, kind, **options) for each in (strategy, "auto")]
    assert seen[0] == seen[1] and seen[0][0] != seen[0][1]


@pytest.mark.parametrize("kind", ["weighted", "of a part", "own"])
def test_the_order_that_workers_share_goes_on_in_the_next_training(kind: str) -> None:
    first, second = seen_in_two_trainings("hybrid", kind, workers=2)
    assert first != second and len(first) == len(second) == 12


@pytest.mark.parametrize("workers", [1, 2])
def test_the_order_of_a_shuffled_loader_is_that_of_the_seed_in_each_training(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under DDP: by seed and epoch, whatever generator the loader has."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    first, second = seen_in_two_trainings("hybrid", "shuffled", workers)
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    third, _ = seen_in_two_trainings("hybrid", "shuffled", workers)
    assert first == second != third


class OwnList(list[int]):
    """A list with an attribute."""

    length = 0


class OwnBytes(bytearray):
    pass


class Lengthening(pl.Callback):
    """Holds containers of the user's classes, and what iterators are of the standard library."""

    def __init__(self) -> None:
        self.list, self.bytes, self.count = OwnList([7]), OwnBytes(b"x"), itertools.count()
        self.made: Any = None
        self.also: Any = None
        self.n = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.list.append(1)
        self.list.length = len(self.list)
        self.bytes.append(1)
        self.made, self.also = Own(0), OwnBytes()
        self.n = next(self.count) + 1


def test_containers_of_own_classes_and_iterators_keep_what_they_had() -> None:
    callback = Lengthening()
    run("hybrid", Regression(), "fit", callbacks=[callback])
    assert callback.list == [7] and callback.bytes == b"x" and callback.list.length == 7
    assert callback.made is callback.also is None and callback.n == 6 and next(callback.count) == 0


# ---- what does not come home --------------------------------------------------------------------

SEEN: list[int] = []


class Elsewhere(pl.Callback):
    seen: list[int] = []  # noqa: RUF012  (of the class)

    def __init__(self, inside: list[int]) -> None:
        self.add = lambda: inside.append(1)
        self.own: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        SEEN.append(1)
        trainer.seen = 1
        self.seen.append(1)
        self.add()
        self.own.append(1)


def test_what_is_in_closures_globals_classes_and_on_the_trainer_stays_in_the_worker() -> None:
    inside: list[int] = []
    callback = Elsewhere(inside)
    trainer = run("hybrid", Regression(), "fit", callbacks=[callback])
    assert (inside, SEEN, Elsewhere.seen) == ([], [], []) and len(callback.own) == 6
    assert not hasattr(trainer, "seen")


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.samples, self.asked = regression_data(24), [0]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.asked[0] += 1
        return self.samples[index]


def test_data_sets_and_loaders_stay_as_they_were() -> None:
    data = Samples()
    trainer = make_trainer("hybrid", 1, max_epochs=1)
    trainer.fit(Regression(), DataLoader(data, 4))
    assert data.asked == [0]


class Large(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = torch.zeros(5_000), torch.zeros(20_000)
        self.numbers = [0] * 200_000
        self.layer_of_training: Any = None

    def on_train_batch_end(self, *_: Any) -> None:
        self.layer_of_training = torch.nn.Identity()
        for each in (self.small, self.large):
            each += 1
        self.numbers[0] += 1


def test_more_than_results_stays_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_objects, "_LEAST_ELEMENTS", 10_000)
    module = Large()
    run("hybrid", module, "fit")
    assert module.small[0] == 6 and module.large[0] == 0
    assert module.numbers[0] == 0 and module.layer_of_training is None


class View(pl.Callback):
    """Holds parameters by themselves, in a list, and by a view."""

    def __init__(self, module: Any) -> None:
        self.module, self.parameters = module, list(module.parameters())
        self.view = module.net[0].weight.data.view(-1)


@pytest.mark.parametrize("workers", [1, 2])
@STRATEGY
def test_views_of_weights_show_the_trained_ones(strategy: str, workers: int) -> None:
    module = Regression()
    callback = View(module)
    before = callback.view.clone()
    run(strategy, module, "fit", workers=workers, callbacks=[callback])
    assert torch.equal(callback.view, module.net[0].weight.view(-1))
    assert callback.module is module and callback.parameters[0] is module.net[0].weight
    assert not torch.equal(callback.view, before)
