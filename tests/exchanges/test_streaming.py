"""Streaming DiLoCo: the algorithm of its paper, to the last digit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtrain.engine.exchanges import begin_policy, make_exchange
from hybridtrain.engine.exchanges.streaming import fragments_of
from hybridtrain.engine.policies import make_policy
from hybridtrain.engine.updates.named import make_update
from hybridtrain.errors import UserError
from hybridtrain.virtual.network import Conditions, Network
from tests.exchanges.test_own_parameters import adam, world

OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


class Layers:
    """½ Σ a (w - c)² over four tensors: two layers, or four fragments."""

    def __init__(self, workers: int) -> None:
        drawn = torch.Generator().manual_seed(3)

        def made() -> list[torch.Tensor]:
            shapes = ((2, 3), (3,), (3, 1), (1,))
            return [torch.randn(s, dtype=torch.float64, generator=drawn) for s in shapes]

        self.start, self.scales = made(), [0.5 + x.abs() for x in made()]
        self.centres = [made() for _ in range(workers)]

    def parameters(self) -> list[torch.Tensor]:
        return [each.clone() for each in self.start]

    def gradient(self, worker: int, values: Any) -> list[torch.Tensor]:
        each = zip(self.scales, values, self.centres[worker], strict=True)
        return [scale * (value - centre) for scale, value, centre in each]


def simulated(exchange: Any, workers: int = 2, **rest: Any) -> Any:
    update = make_update({"name": "sgd", **OUTER})
    return world(Layers(workers), workers, adam, exchange, update=update, **rest)


def streaming(every: int, fragments: int, overlap: int = 0, mix: float = 0.0, **rest: Any) -> Any:
    return {
        "name": "streaming",
        "every": every,
        "fragments": fragments,
        "overlap": overlap,
        "mix": mix,
        **rest,
    }


def written_down(
    workers: int, steps: int, every: int, fragments: int, overlap: int, mix: float
) -> list[torch.Tensor]:
    """Algorithm 2 of Douillard et al. 2025 in plain torch."""
    task = Layers(workers)
    masters = [torch.nn.Parameter(p) for p in task.parameters()]
    outer = torch.optim.SGD(masters, **OUTER)  # its state is that of each tensor
    own = [[torch.nn.Parameter(m.detach().clone()) for m in masters] for _ in range(workers)]
    inner = [adam(each) for each in own]
    places = {
        2: [[0, 1], [2, 3]],  # layers
        3: [[0, 3], [1], [2]],  # more fragments than layers: tensors
        1: [[0, 1, 2, 3]],
    }[fragments]
    arriving: dict[int, tuple[int, list[torch.Tensor]]] = {}
    for step in range(1, steps + 1):
        for worker in range(workers):
            found = task.gradient(worker, [p.detach() for p in own[worker]])
            for parameter, gradient in zip(own[worker], found, strict=True):
                parameter.grad = gradient
            inner[worker].step()
        for fragment, chosen in enumerate(places):
            if step % every == (fragment + 1) * every // fragments % every:
                pseudo = [
                    torch.stack([masters[n].detach() - x[n].detach() for x in own]).mean(0)
                    for n in chosen
                ]
                arriving[step + overlap] = fragment, pseudo
        if step in arriving:
            fragment, pseudo = arriving[step]
            outer.zero_grad()
            for n, gradient in zip(places[fragment], pseudo, strict=True):
                masters[n].grad = gradient  # downhill: masters less the mean of the workers'
            outer.step()
            for n in places[fragment]:
                for each in own:
                    each[n].data = mix * each[n].data + (1 - mix) * masters[n].data
    return [m.detach() for m in masters]


@pytest.mark.parametrize(
    ("every", "fragments", "overlap", "mix"),
    [
        (4, 2, 0, 0.0),
        (4, 2, 1, 0.0),
        (6, 2, 2, 0.5),
        (7, 3, 1, 0.25),
        (3, 1, 2, 0.5),
        (2, 2, 0, 1.0),
    ],
)
def test_streaming_diloco_is_the_algorithm_of_the_paper(
    every: int, fragments: int, overlap: int, mix: float
) -> None:
    made = simulated(streaming(every, fragments, overlap, mix), workers=3)
    made.run(updates=7)
    steps = int(made.now_s)
    expected = written_down(3, steps + overlap, every, fragments, overlap, mix)
    for found, wanted in zip(made.parameters(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_one_fragment_without_overlap_is_diloco_to_the_bit() -> None:
    runs = [simulated(e) for e in (streaming(3, 1), {"name": "movement", "every": 3})]
    for each in runs:
        each.run(updates=5)
    assert all(map(torch.equal, *(each.parameters() for each in runs)))
    assert runs[0].now_s == runs[1].now_s


def test_the_pseudo_gradients_of_streaming_diloco_lead_downhill() -> None:
    """The sign of the pseudo-gradient: with plain SGD outside, masters go where workers are."""
    task = Layers(1)
    made = world(task, 1, adam, streaming(2, 2), update=make_update({"name": "sgd", "lr": 1.0}))
    made.run(updates=30)
    before, after = (
        sum(float((p - c).abs().sum()) for p, c in zip(values, task.centres[0], strict=True))
        for values in (task.start, made.parameters())
    )
    assert after < 0.8 * before


def test_streaming_diloco_sends_only_one_fragment_at_a_time() -> None:
    made = simulated(streaming(4, 2))
    made.run(updates=1)
    assert made.server.statistics.sent_bytes == 2 * 8 * (6 + 3)  # workers, bytes, first layer
    made.run(updates=2)
    assert made.server.statistics.sent_bytes == 2 * 8 * (6 + 3 + 3 + 1)


def test_with_overlap_a_slow_network_costs_no_time() -> None:
    """Workers compute while a fragment is under way, and wait only where it is later than τ."""
    network = Network(latency_s=0.6)
    ends = {}
    for overlap in (0, 1, 2):
        made = simulated(streaming(6, 2, overlap), conditions=Conditions(network=network))
        made.run(updates=5)
        ends[overlap] = made.now_s
    assert ends == {0: 15 + 4 * 1.2 + 0.6, 1: pytest.approx(15 + 4 * 0.2 + 0.6), 2: 15.6}


def test_fragments_are_layers_by_turns() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    tensors = list(net.parameters())
    assert fragments_of(tensors, 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert fragments_of(tensors, 5) == [[0, 5], [1, 6], [2, 7], [3], [4]]


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"every": 0}, ["exchange.every=0", "from 1 on"]),
        ({"fragments": 0}, ["exchange.fragments=0", "from 1 on"]),
        ({"fragments": 2.0}, ["exchange.fragments=2.0", "whole number"]),
        ({"every": 3, "fragments": 4, "overlap": 0}, ["exchange.fragments=4", "from 1 to 3"]),
        ({"every": 6, "fragments": 2, "overlap": 3}, ["exchange.overlap=3", "from 0 to 2"]),
        ({"overlap": -1}, ["exchange.overlap=-1", "from 0 on"]),
        ({"overlap": 1.5}, ["exchange.overlap=1.5", "whole number"]),
        ({"mix": 1.5}, ["exchange.mix=1.5", "from 0", "to 1"]),
        ({"mix": "half"}, ["exchange.mix='half'"]),
        ({"overlaps": 1}, ["exchange.overlaps", "did you mean overlap?"]),
    ],
)
def test_bad_options_of_the_streaming_exchange_are_refused(
    options: dict[str, Any], fragments: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        make_exchange({"name": "streaming", **options})
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize("policy", ["async", {"name": "grace", "window_s": 1.0}, "ssp"])
def test_workers_that_run_freely_are_refused(policy: Any) -> None:
    with pytest.raises(UserError, match=r"run freely.*use policy=hybrid"):
        begin_policy(make_policy(policy), make_exchange("streaming"), 2)


def test_more_fragments_than_parameters_are_refused() -> None:
    with pytest.raises(UserError, match=r"fragments=5 .* only 4 parameters .* from 1 to 4"):
        simulated(streaming(10, 5)).run(updates=1)
