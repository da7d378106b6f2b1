"""The bidirectional plain recurrence of the 2014 paper: h_t = min(max(0, x_t + U h_{t-1}), clip).

Both directions run in **one** loop: the backward direction is the forward one over sequences
reversed *within their own length*, so the two are a batched product of shape (2, B, H) x (2, H, H)
and the padding of a batch is only ever met after a sequence has ended.

The gradient is written by hand. Autograd would add a (2, H, H) weight gradient at every frame,
which moves more memory than the recurrence itself; here it is one product over all frames.

Shapes: T frames, B samples, H units, D = 2 directions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


class _ClippedRecurrence(torch.autograd.Function):
    """All frames of ``h_t = clamp(x_t + h_{t-1} U, 0, clip)`` for D directions at once."""

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
    """Layer 4 of the paper, its two directions summed.

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
