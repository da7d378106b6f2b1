"""The two DeepSpeech acoustic models: frames of features in, one score per symbol and frame out.

Shapes: B samples, T frames, F features per frame, C context frames on each side, H units
(``width``), S symbols of the alphabet plus the CTC blank, which is the last.

A sample gets the same scores alone and in a padded batch: beyond its end layer 1 sees zeros,
the LSTM runs forward only, and the backward direction of the paper's net starts at the true end.
Inside, time comes first: that is how the recurrences run and how CTC wants it. The LSTM gets padded
and not packed sequences, as only those have oneDNN's kernel (7 times faster on a CPU).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hybridtrain.errors import UserError
from hybridtrain.util.option_types import Above0, Decay, Natural, Positive, check_arguments


def context_windows(features: Tensor, lengths: Tensor, context: int, stride: int = 1) -> Tensor:
    """Put C frames of the past and C of the future beside each ``stride``-th frame.

    features (B, T, F) -> (ceil(T / stride), B, (2C+1) * F), oldest frame first. Beyond the ends of
    a sample lie zeros, whatever the batch holds there.
    """
    inside = torch.arange(features.shape[1], device=features.device) < lengths[:, None]
    frames = (features * inside[:, :, None]).transpose(0, 1)  # (T, B, F)
    padded = pad(frames, (0, 0, 0, 0, context, context))
    windows = padded.unfold(0, 2 * context + 1, stride)  # (T', B, F, 2C+1)
    return windows.transpose(2, 3).flatten(2)


class ClippedDense(nn.Sequential):
    """Dropout(LayerNorm?(min(max(0, W x + b), clip))), the order of Coqui STT's ``dense``."""

    def __init__(
        self, n_input: int, n_output: int, clip: float, dropout: float, layer_norm: bool = False
    ) -> None:
        """``n_input`` to ``n_output`` units; ``dropout`` is the share of units dropped."""
        linear = nn.Linear(n_input, n_output)
        norm = [nn.LayerNorm(n_output)] if layer_norm else []
        super().__init__(linear, nn.Hardtanh(0.0, clip), *norm, nn.Dropout(dropout))


def initialise(net: nn.Module) -> None:
    """Glorot-uniform weights and zero biases for every dense layer and LSTM (STT's scheme)."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LSTM):
            _initialise_lstm(module)


def _initialise_lstm(lstm: nn.LSTM) -> None:
    """TensorFlow holds an LSTM as one (n_input + H, 4H) kernel, and Glorot's fans are its."""
    fan = lstm.input_size + lstm.hidden_size + 4 * lstm.hidden_size
    bound = (6.0 / fan) ** 0.5
    for name, parameter in lstm.named_parameters():
        nn.init.zeros_(parameter) if "bias" in name else nn.init.uniform_(parameter, -bound, bound)


class AcousticNet(nn.Module, ABC):
    """Three dense layers on windows of frames, a recurrence, and two dense layers.

    Args:
        n_input: features per frame.
        n_output: letters + 1.
        width: H.
        context: C, frames on each side.
        relu_clip: of the dense layers.
        dropout: one share for layers 1, 2, 3 and 5, or those four (DeepSpeech calls the fourth
            ``dropout_rate6``; the recurrence has none).
        layer_norm: in the dense layers.
    """

    stride = 1  # frames for each output

    def __init__(
        self,
        n_input: int = 26,
        n_output: int = 29,
        width: Positive = 2048,
        context: Natural = 9,
        relu_clip: Above0 = 20.0,
        dropout: Decay | Sequence[Decay] = 0.05,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        *rates, last = _four_rates(dropout)
        self.context = context
        sizes = (n_input * (2 * context + 1), width, width)
        self.dense = nn.Sequential(
            *(
                ClippedDense(size, width, relu_clip, rate, layer_norm)
                for size, rate in zip(sizes, rates, strict=True)
            )
        )
        self.layer4 = self.recurrence(width, relu_clip)
        self.dense5 = ClippedDense(width, width, relu_clip, last, layer_norm)
        self.output = nn.Linear(width, n_output)
        initialise(self)

    @abstractmethod
    def recurrence(self, width: int, relu_clip: float) -> nn.Module:
        """Make layer 4, of ``width`` units."""

    @abstractmethod
    def states(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Layer 4 on x (T', B, H) and the samples' lengths in it -> (T', B, H)."""

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """features (B, T, F), lengths (B,) -> scores (B, ceil(T / stride), S).

        They mean nothing past a sample's end.
        """
        windows = context_windows(features, lengths, self.context, self.stride)
        states = self.states(self.dense(windows), self.output_lengths(lengths))
        return cast(Tensor, self.output(self.dense5(states)).transpose(0, 1))

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """How many outputs belong to each sample, (B,): one per ``stride`` frames, rounded up."""
        return torch.div(lengths + self.stride - 1, self.stride, rounding_mode="floor")


class DeepSpeechSTT(AcousticNet):
    """The model of Mozilla DeepSpeech 0.5+ and Coqui STT: 3 dense layers, an LSTM, 2 dense layers.

    At width 2048 with 28 letters it has 47,233,053 parameters: TensorFlow's 47,224,861 and, as
    ``nn.LSTM`` keeps two biases where TensorFlow keeps one, 4 * 2048 more.
    """

    def recurrence(self, width: int, relu_clip: float) -> nn.Module:
        return nn.LSTM(width, width)

    def states(self, x: Tensor, lengths: Tensor) -> Tensor:
        return cast(Tensor, self.layer4(x)[0])


class DeepSpeechPaper(AcousticNet):
    """Hannun et al., Deep Speech (2014), section 3: a bidirectional plain RNN, no LSTM.

    Layers 1 to 3 are dense, layer 4 runs both ways in time, layer 5 takes the *sum* of the two
    directions, and only every ``stride``-th frame is looked at (with its context), which halves the
    recurrent steps. Dropout is on the dense layers only. The paper uses context 5, 7 or 9.
    """

    def __init__(
        self,
        n_input: int = 26,
        n_output: int = 29,
        width: Positive = 2048,
        context: Natural = 9,
        relu_clip: Above0 = 20.0,
        dropout: Decay | Sequence[Decay] = 0.05,
        stride: Positive = 2,
    ) -> None:
        super().__init__(n_input, n_output, width, context, relu_clip, dropout)
        self.stride = stride

    def recurrence(self, width: int, relu_clip: float) -> nn.Module:
        return BidirectionalClippedRNN(width, width, relu_clip)

    def states(self, x: Tensor, lengths: Tensor) -> Tensor:
        return cast(Tensor, self.layer4(x, lengths))


NETS: dict[str, type[AcousticNet]] = {"stt": DeepSpeechSTT, "paper": DeepSpeechPaper}


def build_net(options: Mapping[str, Any], n_input: int, n_output: int) -> AcousticNet:
    """Make the net that ``options`` describe: ``kind`` (a key of ``NETS``) and its arguments.

    Plain data instead of an object, so that a checkpoint can carry it and name no code.
    """
    arguments = dict(options)
    kind = arguments.pop("kind", None)
    if kind not in NETS:
        raise UserError(f"model.net.kind={kind!r}: choose one of {', '.join(NETS)}")
    check_arguments(NETS[kind], arguments, "model.net.")
    try:
        return NETS[kind](n_input=n_input, n_output=n_output, **arguments)
    except TypeError as error:
        raise UserError(f"model.net does not fit kind={kind!r}: {error}") from error


def _four_rates(dropout: float | Sequence[float]) -> list[float]:
    """The shares of layers 1, 2, 3 and 5."""
    rates = list(dropout) if isinstance(dropout, Sequence) else [dropout] * 4
    if len(rates) != 4:
        raise UserError(
            f"model.net.dropout={dropout!r}: give one share, or four, for layers 1, 2, 3 and 5"
        )
    return rates


class _ClippedRecurrence(torch.autograd.Function):
    """All frames of ``h_t = clamp(x_t + h_{t-1} U, 0, clip)`` for D = 2 directions at once.

    Autograd would add a (2, H, H) weight gradient at every frame, which moves more memory than the
    recurrence itself; the gradient written here is one product over all frames.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, recurrent: Tensor, clip: float) -> Tensor:
        """x (T, D, B, H), recurrent (D, H, H) -> states (T, D, B, H)."""
        states = torch.empty_like(x)
        state = torch.zeros_like(x[0])
        for t in range(len(x)):
            state = torch.baddbmm(x[t], state, recurrent).clamp_(0.0, clip)
            states[t] = state
        ctx.save_for_backward(states, recurrent)
        ctx.clip = clip
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients with respect to x (T, D, B, H) and recurrent (D, H, H)."""
        states, recurrent = ctx.saved_tensors
        inside = (states > 0) & (states < ctx.clip)
        d_x = grads[0] * inside
        transposed = recurrent.transpose(1, 2)
        for t in range(len(states) - 2, -1, -1):
            d_x[t] += torch.bmm(d_x[t + 1], transposed) * inside[t]
        before = states[:-1].permute(1, 3, 0, 2).flatten(2)  # (D, H, (T-1)*B)
        after = d_x[1:].permute(1, 0, 2, 3).flatten(1, 2)  # (D, (T-1)*B, H)
        return d_x, torch.bmm(before, after), None


def clipped_recurrence(x: Tensor, recurrent: Tensor, clip: float) -> Tensor:
    """Run the recurrence; x (T, D, B, H), recurrent (D, H, H) -> states (T, D, B, H).

    It computes in the precision of the weights: under autocast a recurrence of hundreds of
    products in 16 bits would lose the state.
    """
    with torch.autocast(x.device.type, enabled=False):
        out = _ClippedRecurrence.apply(x.to(recurrent.dtype), recurrent, clip)
    return cast(Tensor, out)


def reversal(lengths: Tensor, frames: int) -> Tensor:
    """Index (T, B) that reverses each sequence within its length and leaves its padding."""
    t = torch.arange(frames, device=lengths.device)[:, None]  # (T, 1)
    mirrored = lengths - 1 - t  # (T, B), negative past the end
    return torch.where(mirrored >= 0, mirrored, t)


class BidirectionalClippedRNN(nn.Module):
    """Layer 4 of the paper, its two directions summed; both run in one loop.

    The backward direction is the forward one over sequences reversed within their own length, so
    both are one batched product, and padding comes only after the end of a sequence.

    As in the paper (section 3) the input weights W4 and the bias b4 are shared by both
    directions, and only the recurrent matrices differ.
    """

    def __init__(self, n_input: int, width: int, relu_clip: float = 20.0) -> None:
        """``n_input`` features in, ``width`` units per direction, states clipped at the last."""
        super().__init__()
        self.relu_clip = relu_clip
        self.input = nn.Linear(n_input, width)
        self.recurrent = nn.Parameter(torch.empty(2, width, width))  # forward, backward
        for matrix in self.recurrent:
            nn.init.orthogonal_(matrix)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x (T, B, n_input), lengths (B,) -> sum of both directions (T, B, width)."""
        x = self.input(x)
        index = reversal(lengths, len(x))[:, :, None].expand_as(x)
        both = torch.stack([x, x.gather(0, index)], dim=1)  # (T, 2, B, width)
        ahead, behind = clipped_recurrence(both, self.recurrent, self.relu_clip).unbind(1)
        return ahead + behind.gather(0, index)
