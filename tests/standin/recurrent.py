"""The cells of LSTM and GRU: torch has no kernel for them on a CPU, and calls one elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.standin.kernels import INSTEAD, aten


def lstm(
    input_gates: Tensor, hidden_gates: Tensor, c: Tensor, *bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Next h, next c, what backward needs: the four gates."""
    gates = input_gates + hidden_gates + sum(each for each in bias if each is not None)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * c + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def lstm_backward(
    by_h: Tensor | None, by_c: Tensor | None, c: Tensor, new: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Any, ...]:
    """Gradients by the gates, by c, by the bias."""
    i, f, g, o = kept.chunk(4, 1)
    by_h = torch.zeros_like(c) if by_h is None else by_h
    inner = by_h * o * (1 - new.tanh() ** 2) + (0 if by_c is None else by_c)
    by_gates = torch.cat(
        [
            inner * g * i * (1 - i),
            inner * c * f * (1 - f),
            inner * i * (1 - g**2),
            by_h * new.tanh() * o * (1 - o),
        ],
        1,
    )
    return by_gates, inner * f, by_gates.sum(0) if has_bias else None


def gru(
    input_gates: Tensor, hidden_gates: Tensor, h: Tensor, *bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Next h, what backward needs."""
    of_input, of_hidden = bias if bias and bias[0] is not None else (0, 0)
    ir, iz, i_n = (input_gates + of_input).chunk(3, 1)
    hr, hz, hn = (hidden_gates + of_hidden).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * hn).tanh()
    return n + z * (h - n), torch.cat([r, z, n, h, hn], 1)


def gru_backward(by_h: Tensor, kept: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Gradients by the gates of input and hidden state, by h, by both biases."""
    r, z, n, h, hn = kept.chunk(5, 1)
    by_n = by_h * (1 - z) * (1 - n**2)
    by_r, by_z = by_n * hn * r * (1 - r), by_h * (h - n) * z * (1 - z)
    by_input = torch.cat([by_r, by_z, by_n], 1)
    by_hidden = torch.cat([by_r, by_z, by_n * r], 1)
    by_bias = (by_input.sum(0), by_hidden.sum(0)) if has_bias else (None, None)
    return by_input, by_hidden, by_h * z, *by_bias


INSTEAD |= {
    aten._thnn_fused_lstm_cell.default: lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_backward,
    aten._thnn_fused_gru_cell.default: gru,
    aten._thnn_fused_gru_cell_backward.default: gru_backward,
}
