"""From the loss to the step: clipping, accumulation, manual optimization, hooks on gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch

from tests.parity.case import Grade, Theme
from tests.parity.toys import Net, even, loaders

THEME = Theme("steps", even)
add = partial(THEME.add, expect=Grade.BITWISE)


def clip(limit: float, algorithm: str) -> dict[str, Any]:
    return {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}


# ---- clipping and accumulation ------------------------------------------------------------------

add("clipping by norm", Net, trainer=clip(0.05, "norm"), wide=True)
add("clipping by value", Net, trainer=clip(0.01, "value"))
add("clipping that never acts", Net, trainer=clip(1e6, "norm"))


class OwnClipping(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.01, 0.01)


class FirstLayerOnly(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.net[0].parameters(), gradient_clip_val)
        self.log("norm", norm)


add("configure_gradient_clipping overridden", OwnClipping, wide=True)
add("clipping of one layer by hand", FirstLayerOnly, trainer=clip(0.05, "norm"))
add("accumulation", Net, trainer={"accumulate_grad_batches": 2})
add("accumulation with an odd remainder", Net, trainer={"accumulate_grad_batches": 4}, wide=True)
add("accumulation with clipping", Net, trainer=clip(0.05, "norm") | {"accumulate_grad_batches": 4})
add("accumulation longer than an epoch", Net, trainer={"accumulate_grad_batches": 10})

# ---- hooks that look at gradients ---------------------------------------------------------------


def norms(module: torch.nn.Module) -> list[float]:
    """What a hook sees."""
    return [float(p.grad.double().norm()) for p in module.parameters() if p.grad is not None]


class LooksAfterBackward(Net):
    def on_after_backward(self) -> None:
        self.notes.append(norms(self))


class LooksBeforeStep(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.notes.append(norms(self))
        self.log("gradient", sum(norms(self)))


class LooksBeforeZero(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append(norms(self))


class LooksAtBatchEnd(Net):
    """Its overridden hook lets gradients be averaged, also where others look at them."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Nothing."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.notes.append(norms(self))


class LooksInStep(Net):
    """Reads what the last mini-batch has left in ``.grad``."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Nothing: the hook lets gradients be averaged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.notes.append(norms(self))
        return super().training_step(batch, batch_idx)


class Changes(Net):
    """Noise in one hook, scaling in the next."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(torch.randn_like(parameter), alpha=0.01)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[0].weight.grad.mul_(2.0)


class Drops(Net):
    """A gradient is taken away: the optimizer leaves that parameter alone."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[2].bias.grad = None


class Watcher(pl.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.notes.append(norms(pl_module))


class OnTensor(Net):
    """Hooks on a parameter, as autograd calls them: this worker's own gradient."""

    def on_fit_start(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)


class AfterAccumulation(Net):
    """The hook that fires when ``.grad`` has got its value."""

    def on_fit_start(self) -> None:
        def halve(parameter: torch.Tensor) -> None:
            parameter.grad.mul_(0.5)

        self.net[0].weight.register_post_accumulate_grad_hook(halve)


class OwnBackward(Net):
    def backward(self, loss: torch.Tensor) -> None:
        (3 * loss).backward()


class Penalty(Net):
    """A gradient of a gradient, inside the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return self.loss(batch) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()


class Reads(Net):
    """Parts of the step's result are passed on to the hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "size": len(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes.append((float(outputs["loss"]), outputs["size"]))


add("on_after_backward reads gradients", LooksAfterBackward, wide=True)
add("on_before_optimizer_step reads gradients", LooksBeforeStep)
add("on_before_zero_grad reads gradients", LooksBeforeZero)
add("on_train_batch_end reads gradients", LooksAtBatchEnd)
add("training_step reads gradients", LooksInStep)
add("hooks change gradients", Changes, wide=True)
add("hooks take gradients away", Drops)
add("a callback reads gradients", Net, trainer=lambda _: {"callbacks": [Watcher()]})
add("a hook on a tensor", OnTensor)
add("a hook after accumulation", AfterAccumulation)
add("backward overridden", OwnBackward)
add("gradient penalty", Penalty)
add("training_step returns a dictionary", Reads)
add(
    "gradients read while accumulating",
    LooksBeforeStep,
    trainer={"accumulate_grad_batches": 4},
    wide=True,
)
add("track_grad_norm by hand, clipped", LooksBeforeStep, trainer=clip(0.05, "norm"))

# ---- hooks that write parameters ----------------------------------------------------------------


class Clamps(Net):
    """As the critic of a Wasserstein GAN."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)


class ClampsInStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


class Decays(Net):
    """Weight decay by hand, before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


class DecaysAtBatchStart(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


class Resets(Net):
    """A layer begins anew in every epoch, by ``load_state_dict``."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.kept = {k: v.clone() for k, v in self.net[0].state_dict().items()}
        self.net[0].load_state_dict(self.kept)


class Replaces(Net):
    """``.data`` is replaced, not written into."""

    def on_train_epoch_start(self) -> None:
        self.net[0].weight.data = self.net[0].weight.data * 0.5


class ClampsInOptimizerStep(Net):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.2, 0.2)


add("weights clamped after the step", Clamps, wide=True)
add("weights clamped in training_step", ClampsInStep)
add("weights decayed before the step", Decays)
add("weights decayed at the batch's start", DecaysAtBatchStart)
add("weights clamped in optimizer_step", ClampsInOptimizerStep)
add("a layer reset by load_state_dict", Resets)
add("data replaced", Replaces)

# ---- nothing to step ----------------------------------------------------------------------------


class Skips(Net):
    """Nobody has a loss in every third mini-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 0 else super().training_step(batch, batch_idx)


class SkipsAlone(Net):
    """Only some of the workers have no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 and batch_idx == 0 else loss


add(
    "training_step returns None for all",
    Skips,
    versus="union",
    expect=Grade.ROUNDING,
    trainer={"overfit_batches": 1.0},
    reason="DDP refuses a step that returns None",
)
add(
    "uneven loss weights",
    partial(Net),
    data=partial(loaders, 45, 24),
    versus="union",
    expect=Grade.ROUNDING,
    trainer={"overfit_batches": 1.0},
    reason="DDP pads 45 samples to 46 or 48 and takes the mean of means",
    wide=True,
)
