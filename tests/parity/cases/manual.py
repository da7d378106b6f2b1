"""Manual optimization: the module steps its optimizers itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch

from tests.parity.case import Grade, Theme
from tests.parity.cases.optimizers import FUSED, adam
from tests.parity.toys import Net, even, sgd

THEME = Theme("manual", even)
add = partial(THEME.add, expect=Grade.BITWISE)


class Manual(Net):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train/loss", loss)


class Closure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.log("train/loss", optimizer.step(closure=closure))


class Clipped(Manual):
    """Clipping in manual optimization, by Lightning's function and by torch's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.05, "norm")
        self.notes.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.04)))
        optimizer.step()


class Accumulates(Manual):
    """Accumulation by hand, a remainder at the end of the epoch included."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 4)
        if (batch_idx + 1) % 4 == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()


class TwoBackwards(Manual):
    """Two losses, two backward passes, one step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.notes.append(float(self.net[0].weight.grad.double().norm()))
        self.manual_backward(0.1 * self(batch[0]).pow(2).mean())
        self.notes.append(float(self.net[0].weight.grad.double().norm()))
        optimizer.step()


class TwoSteps(Manual):
    """Two steps of one optimizer on each mini-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class Scheduled(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


class Gan(pl.LightningModule):
    """Two optimizers that take turns, each with its own parameters, one of them stepped less."""

    def __init__(self, toggle: bool = True, optimizer: Any = sgd, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle, self.make_optimizer, self.every = toggle, optimizer, every
        self.generator = torch.nn.Linear(2, 4)
        self.critic = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, 1)

    def judge(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.critic(x))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        if batch_idx % self.every == 0:
            self._turn(one, lambda: -self.judge(self.generator(batch[0][:, :2])).mean())
        fake = self.generator(batch[0][:, :2]).detach()
        self._turn(two, lambda: (self.judge(fake) - self.judge(batch[0])).pow(2).mean())

    def _turn(self, optimizer: Any, loss: Any) -> None:
        if self.toggle:
            self.toggle_optimizer(optimizer)
        value = loss()
        self.log(f"loss/{self.optimizers().index(optimizer)}", value)
        self.manual_backward(value)
        optimizer.step()
        optimizer.zero_grad()
        if self.toggle:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        critic = [*self.critic.parameters(), *self.head.parameters()]
        return self.make_optimizer(self.generator.parameters()), self.make_optimizer(critic)


unused: dict[str, Any] = {"ddp": "ddp_fork_find_unused_parameters_true"}

add("one optimizer", Manual, wide=True)
add("a closure", Closure)
add("clipping by hand", Clipped)
add("accumulation by hand", Accumulates)
add("two backward passes, one step", TwoBackwards)
add("two steps on one mini-batch", TwoSteps)
add(
    "a scheduler stepped by hand",
    partial(Scheduled, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)),
)
add("GAN with toggle_optimizer", Gan, wide=True, **unused)
add(
    "GAN with toggle_optimizer, Adam",
    partial(Gan, True, adam),
    **unused | {"expect": Grade.ROUNDING, "reason": FUSED},
)
add("GAN without toggle_optimizer", partial(Gan, False), **unused)
add("GAN, the generator every third time", partial(Gan, every=3), **unused)
