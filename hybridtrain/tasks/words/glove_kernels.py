"""Steps of GloVe (Pennington et al. 2014), one entry after the other, in place. Needs numba.

Legend: V words, D dimensions, n entries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridtrain.tasks.compiled import compiled

_LEAST = 1e-10  # as torch's Adagrad has it


@compiled
def glove_steps(tables: Any, squares: Any, entries: Any, x_max: float, alpha: float) -> Any:
    """AdaGrad with rate 1, whatever the sums of ``squares`` began with; returns the sum of losses.

    ``tables`` and ``squares``: of words and contexts (V, D), biases of both (V, 1); ``entries``:
    rows, columns, counts (n,).
    """
    vectors, contexts, biases, context_biases = tables
    squares, context_squares, bias_squares, context_bias_squares = squares
    rows, columns, counts = entries
    kind = vectors.dtype.type
    least, one = kind(_LEAST), kind(1)
    loss = 0.0
    for n in range(len(rows)):
        row, column, count = rows[n], columns[n], counts[n]
        word, context = vectors[row], contexts[column]
        seen, context_seen = squares[row], context_squares[column]
        gap = kind(biases[row, 0] + context_biases[column, 0] - np.log(kind(count)))
        for k in range(len(word)):
            gap += word[k] * context[k]
        share = one if count >= x_max else kind((count / x_max) ** alpha)
        pull = share * gap
        loss += 0.5 * pull * gap
        for k in range(len(word)):
            step, context_step = pull * context[k], pull * word[k]
            seen[k] += step * step
            context_seen[k] += context_step * context_step
            word[k] -= step / (np.sqrt(seen[k]) + least)
            context[k] -= context_step / (np.sqrt(context_seen[k]) + least)
        bias_squares[row, 0] += pull * pull
        context_bias_squares[column, 0] += pull * pull
        biases[row, 0] -= pull / (np.sqrt(bias_squares[row, 0]) + least)
        context_biases[column, 0] -= pull / (np.sqrt(context_bias_squares[column, 0]) + least)
    return loss
