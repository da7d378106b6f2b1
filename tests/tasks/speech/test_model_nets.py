"""The two acoustic nets: size, wiring, and indifference to padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybridtrain.errors import UserError
from hybridtrain.tasks.speech.nets import (
    BidirectionalClippedRNN,
    ClippedDense,
    DeepSpeechPaper,
    DeepSpeechSTT,
    build_net,
    clipped_recurrence,
    context_windows,
)

KINDS = ["stt", "paper"]
LSTM_GATES = 4


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def small(kind: str, **options: object) -> nn.Module:
    torch.manual_seed(1)
    return build_net({"kind": kind, "width": 12, "context": 2, **options}, 5, 7)


@pytest.mark.parametrize(("width", "tensorflow"), [(2048, 47_224_861), (100, 163_129)])
def test_stt_has_the_published_number_of_parameters(width: int, tensorflow: int) -> None:
    net = DeepSpeechSTT(n_input=26, n_output=29, width=width)
    second_bias = LSTM_GATES * width  # nn.LSTM adds two biases where TensorFlow adds one
    assert parameters(net) == tensorflow + second_bias
    if width == 2048:
        assert parameters(net) == 47_233_053


def test_paper_has_two_recurrent_matrices_and_one_sum() -> None:
    net = DeepSpeechPaper(n_input=81, n_output=29, width=64, context=7)
    dense = 64 * 64 + 64
    assert parameters(net) == (81 * 15 * 64 + 64) + 3 * dense + dense + 2 * 64 * 64 + (64 * 29 + 29)


def test_context_windows_put_the_neighbours_beside_each_frame_oldest_first() -> None:
    features = torch.tensor([[[1.0], [2.0], [3.0], [99.0]]])  # the last lies past the end
    windows = context_windows(features, torch.tensor([3]), context=1)
    expected = [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 0.0], [3.0, 0.0, 0.0]]
    assert windows[:, 0].tolist() == expected
    strided = context_windows(features, torch.tensor([3]), context=1, stride=2)
    assert strided[:, 0].tolist() == expected[::2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_scores_the_same_alone_and_in_a_padded_batch(kind: str) -> None:
    net = small(kind).eval()
    lengths = torch.tensor([4, 11, 7, 1])
    features = torch.randn(4, 11, 5)
    features += (torch.arange(11) >= lengths[:, None])[:, :, None] * 1e3  # what padding may hold
    together = net(features, lengths)
    for row, n in enumerate(lengths.tolist()):
        alone = net(features[row : row + 1, :n], lengths[row : row + 1])[0]
        assert len(alone) == int(net.output_lengths(lengths)[row])
        torch.testing.assert_close(together[row, : len(alone)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "frames"), [("stt", [1, 2, 5, 8]), ("paper", [1, 1, 3, 4])])
def test_output_lengths_are_the_frames_that_come_out(kind: str, frames: list[int]) -> None:
    net = small(kind)
    assert net.output_lengths(torch.tensor([1, 2, 5, 8])).tolist() == frames
    assert net(torch.randn(1, 8, 5), torch.tensor([8])).shape == (1, frames[-1], 7)


def test_stt_hears_no_further_ahead_than_its_context_and_paper_hears_everything() -> None:
    features = torch.randn(1, 20, 5)
    changed = features.clone()
    changed[0, 10] += 1.0
    lengths = torch.tensor([20])
    for kind, first in [("stt", 10 - 2), ("paper", 0)]:
        net = small(kind).eval()
        differs = (net(features, lengths) != net(changed, lengths)).any(-1)[0]
        assert int(differs.nonzero()[0]) == first


def test_layers_are_clipped_at_20_before_norm_and_dropout() -> None:
    layer = ClippedDense(1, 3, clip=20.0, dropout=0.0)
    nn.init.ones_(layer[0].weight)
    out = layer(torch.tensor([[1e6], [-1e6]]))
    assert out.max() == 20.0
    assert out.min() == 0.0
    kinds = [type(m).__name__ for m in ClippedDense(1, 3, 20.0, 0.1, layer_norm=True)]
    assert kinds == ["Linear", "Hardtanh", "LayerNorm", "Dropout"]


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_wired_as_published(kind: str) -> None:
    net = small(kind, dropout=[0.1, 0.2, 0.3, 0.6])
    shares = [m.p for m in net.modules() if isinstance(m, nn.Dropout)]
    assert shares == [0.1, 0.2, 0.3, 0.6]  # layers 1, 2, 3 and 5: none in or after the recurrence


def test_stt_starts_glorot_uniform_with_zero_biases() -> None:
    net = DeepSpeechSTT(width=100)
    bound = (6 / (494 + 100)) ** 0.5
    weight, hidden = net.dense[0][0].weight.detach(), net.layer4.weight_hh_l0.detach()
    assert 0.98 * bound < float(weight.abs().max()) <= bound
    kernel = (6 / (100 + 100 + 400)) ** 0.5  # TensorFlow's (inputs + H, 4H) kernel
    assert 0.98 * kernel < float(hidden.abs().max()) <= kernel
    assert all(not p.any() for name, p in net.named_parameters() if "bias" in name)


def slow_recurrence(x: Tensor, recurrent: Tensor, clip: float) -> Tensor:
    state, states = torch.zeros_like(x[0]), []
    for frame in x:
        state = (frame + state @ recurrent).clamp(0.0, clip)
        states.append(state)
    return torch.stack(states)


def test_recurrence_and_its_gradient_are_those_of_the_plain_loop() -> None:
    torch.manual_seed(2)
    x = torch.randn(6, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    recurrent = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    fast, slow = clipped_recurrence(x, recurrent, 1.5), slow_recurrence(x, recurrent, 1.5)
    assert int((slow == 1.5).sum()) > 0  # the clip takes part
    torch.testing.assert_close(fast, slow)
    weights = torch.randn_like(slow)
    ours = torch.autograd.grad((fast * weights).sum(), [x, recurrent])
    theirs = torch.autograd.grad((slow * weights).sum(), [x, recurrent])
    torch.testing.assert_close(ours, theirs)
    one_frame = torch.autograd.grad(clipped_recurrence(x[:1], recurrent, 1.5).sum(), [recurrent])
    assert not one_frame[0].any()


def test_backward_direction_is_the_forward_one_on_reversed_time() -> None:
    torch.manual_seed(3)
    rnn = BidirectionalClippedRNN(3, 4)
    x, lengths = torch.randn(9, 1, 3), torch.tensor([9])
    forwards = rnn(x, lengths)
    with torch.no_grad():
        rnn.recurrent.copy_(rnn.recurrent.flip(0))  # exchange the directions
    torch.testing.assert_close(rnn(x.flip(0), lengths).flip(0), forwards)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lstm"}, "choose one of stt, paper"),
        ({}, "choose one of stt, paper"),
        ({"kind": "paper", "layer_norm": True}, "layer_norm"),
        ({"kind": "stt", "dropout": [0.1, 0.2]}, "layers 1, 2, 3 and 5"),
        ({"kind": "stt", "dropout": 1.5}, "dropout=1.5 was given; .* to below 1"),
        ({"kind": "stt", "dropout": "much"}, "dropout='much' was given"),
        ({"kind": "stt", "width": 0}, "width=0 was given; it must be a whole number from 1 on"),
        ({"kind": "stt", "width": "wide"}, "width='wide'"),
        ({"kind": "stt", "width": 12.5}, "width=12.5"),
        ({"kind": "stt", "context": -1}, "context=-1"),
        ({"kind": "stt", "relu_clip": 0}, "relu_clip=0"),
        ({"kind": "paper", "stride": 0}, "stride=0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_net(options, 5, 7)
