"""Every optimizer of ``torch.optim``, several groups, several optimizers, and users' own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.parity.case import Grade, Theme
from tests.parity.toys import IN_ORDER, Net, even, in_float64, mlp, sgd

THEME = Theme("optimizers", even)
add = partial(THEME.add, expect=Grade.BITWISE)

FUSED = "the host steps Adam with torch's fused kernel, DDP in a loop"
adam = partial(torch.optim.Adam, lr=0.01)

# ---- every class --------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.01, "t0": 2},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.01},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.003, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.01},
}
for name, settings in SETTINGS.items():
    optimizer = partial(getattr(torch.optim, name), **settings)
    add(name, partial(Net, optimizer), wide=name == "SGD")


def without_biases() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(4, 16, bias=False), torch.nn.Tanh(), torch.nn.Linear(16, 1, bias=False)
    )


add("Muon", partial(Net, partial(torch.optim.Muon, lr=0.01), net=without_biases))
add(
    "LBFGS",
    partial(Net, partial(torch.optim.LBFGS, lr=0.1, max_iter=4)),
    data=in_float64,
    trainer={"precision": "64-true"},
    ignore=("*.prev_loss", "module.*"),
    reason="the loss it compares is the mean of all workers, under DDP each rank's own",
)
add(
    "LBFGS, strong Wolfe",
    partial(Net, partial(torch.optim.LBFGS, max_iter=3, line_search_fn="strong_wolfe")),
    trainer=IN_ORDER,
    versus="union",
    expect=Grade.ROUNDING,
    rtol=1e-3,
    reason="under DDP ranks search along the line by their own losses, take different numbers of "
    "steps, and hang",
)


def variant(name: str, kind: str, fused: bool = False, **settings: Any) -> None:
    """One more way to use an optimizer."""
    optimizer = partial(getattr(torch.optim, kind), **({"lr": 0.01} | settings))
    expect, reason = (Grade.ROUNDING, FUSED) if fused else (Grade.BITWISE, "")
    THEME.add(name, partial(Net, optimizer), expect=expect, reason=reason, wide=name == "Adam")


variant("Adam", "Adam", fused=True)
variant("AdamW", "AdamW", fused=True, weight_decay=0.1)
variant("Adam, amsgrad", "Adam", fused=True, amsgrad=True)
variant("Adam, maximize", "Adam", fused=True, maximize=True)
variant("Adam, weight decay", "Adam", fused=True, weight_decay=0.1)
variant("Adam, foreach", "Adam", foreach=True)
variant("Adam, learning rate in a tensor", "Adam", fused=True, lr=torch.tensor(0.01))
variant("SGD, momentum", "SGD", momentum=0.9)
variant("SGD, Nesterov and weight decay", "SGD", momentum=0.9, nesterov=True, weight_decay=0.1)
variant("SGD, dampening and maximize", "SGD", momentum=0.9, dampening=0.5, maximize=True)
variant("RMSprop, foreach", "RMSprop", foreach=True)


def asked_for(fused: bool) -> Any:
    return partial(Net, partial(torch.optim.Adam, lr=0.01, fused=fused))


add(
    "Adam, asked for the fused kernel",
    asked_for(True),
    expect=Grade.ROUNDING,
    reason="the fused kernel rounds the last numel % 16 elements of a tensor differently",
)
add("Adam, asked for no fused kernel", asked_for(False))


# ---- groups -------------------------------------------------------------------------------------


class Groups(Net):
    """Other hyper-parameters for each layer; a name in a group, as users put there."""

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(
            [
                {"params": self.net[2].parameters(), "lr": 0.02, "name": "head"},
                {"params": [self.net[0].weight], "weight_decay": 0.1, "name": "body"},
                {"params": [self.net[0].bias], "lr": 0.0, "name": "rests"},
            ]
        )


add("several groups, Adam", partial(Groups, adam), expect=Grade.ROUNDING, reason=FUSED)
add("several groups, SGD", partial(Groups, sgd), wide=True)


class OwnRates(Groups):
    """The rate is set by hand, group by group, in a hook."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 / (1 + self.global_step)
            group["momentum"] = 0.5 + 0.1 * batch_idx / 6


add("hyper-parameters changed by hand", partial(OwnRates, sgd))

# ---- users' own ---------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Written by hand, with attributes of its own beside the state."""

    def __init__(self, params: Any, lr: float = 0.001) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})
        self.calls = 0
        self.history: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        for group in self.param_groups:
            one, two = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                update = (average * one + p.grad * (1 - one)).tanh()
                p.add_(update, alpha=-group["lr"] / (1 + 0.01 * self.calls))
                average.mul_(two).add_(p.grad, alpha=1 - two)
        return loss


add("a user's own", partial(Net, partial(Lion, lr=0.01)), wide=True)


class Halving(torch.optim.SGD):
    """A subclass that changes the gradient first."""

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        super().step()
        return loss


add("a subclass of SGD", partial(Net, partial(Halving, lr=0.02, momentum=0.9)))


class Lookahead(torch.optim.Optimizer):
    """Wraps another; every third step the slow weights follow."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if self.count % 3 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
        return loss


add("an optimizer that wraps another", partial(Net, lambda params: Lookahead(sgd(params))))

# ---- around the step ----------------------------------------------------------------------------


class OwnStep(Net):
    """``optimizer_step`` overridden: warm-up by hand."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
    ) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.001 * min(10, self.trainer.global_step + 1)


class EverySecond(Net):
    """``optimizer_step`` overridden: every second mini-batch only."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class KeepsZeros(Net):
    """Gradients are set to zero instead of to None."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Hooked(Net):
    """Hooks of the optimizer itself, before and after its step."""

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self.parameters())
        weight = self.net[0].weight
        optimizer.register_step_pre_hook(lambda *_: self.notes.append(float(weight.sum())))
        optimizer.register_step_post_hook(lambda *_: self.notes.append(float(weight.sum())))
        return optimizer


class ReadsState(Net):
    """Looks at the optimizer's state, as a monitor of moments would."""

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.optimizers().state
        self.notes += [float(state[p]["momentum_buffer"].norm()) for p in self.parameters()]


add("optimizer_step overridden", OwnStep)
add("optimizer_step overridden, every second mini-batch", EverySecond)
add("zero_grad keeps zeros", KeepsZeros)
add("hooks of the optimizer", Hooked)
add("a hook reads the optimizer's state", ReadsState)
add("no optimizer", partial(Net, lambda params: None))
add("parameters in 0 dimensions, and empty ones", partial(Net, net=lambda: Odd()))
add(
    "larger than one chunk, Adam",
    partial(Net, adam, net=lambda: Large()),
    expect=Grade.ROUNDING,
    reason=FUSED,
)


class Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = mlp(), torch.nn.Parameter(torch.tensor(1.5))
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale + self.empty.sum()


class Large(torch.nn.Module):
    """600 k parameters, the largest 590 k: chunks of the update are 256 k."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 1003), torch.nn.Tanh(), torch.nn.Linear(1003, 589), torch.nn.Tanh()
        )
        self.head = torch.nn.Linear(589, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))
