"""Compiled steps of word2vec (Mikolov et al. 2013) and GloVe (Pennington et al. 2014), in place.

Needs numba. In word2vec a word's *input* vector predicts by what it has in common with *output*
vectors: those of the neighbour and of some words drawn at random (negative sampling), or those of
the inner nodes on the neighbour's path (hierarchical softmax). All predictions of one input are
made, and outputs stepped, before the input is.

Legend: V words, D dimensions, N numbers of a stretch, n entries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridtrain.tasks.shared_tables import compiled

_LOOKS_EVERY = 16  # predictions, of which one is looked at for the loss
_FRACTION = 2.0**-24


@compiled
def _next(state: Any) -> Any:
    """Xorshift, 64 bits."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@compiled
def _seeded(seed: int) -> Any:
    """Far apart for neighbouring seeds, and never 0."""
    state = np.uint64(seed + 1) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return (state ^ (state >> np.uint64(27))) | np.uint64(1)


@compiled
def _uniform(state: Any) -> Any:
    """Of 24 bits, in [0, 1)."""
    return np.float32(state >> np.uint64(40)) * np.float32(_FRACTION)


@compiled
def _draw(state: Any, kept: Any, other: Any) -> Any:
    """A row of the alias table; uses all bits."""
    row = np.int64(((state >> np.uint64(32)) * np.uint64(len(kept))) >> np.uint64(32))
    low = np.float32(state & np.uint64(0xFFFFFF)) * np.float32(_FRACTION)
    return row if low < kept[row] else np.int64(other[row])


@compiled
def step_towards(hidden: Any, error: Any, output: Any, label: Any, rate: Any) -> Any:
    """Predict ``label`` (0 or 1), step ``output``, add ``hidden``'s step to ``error``, (D,) each.

    Returns the logit.
    """
    one = output.dtype.type(1)
    logit = output.dtype.type(0)
    for k in range(len(output)):
        logit += hidden[k] * output[k]
    gain = (label - one / (one + np.exp(-logit))) * rate
    for k in range(len(output)):
        old = output[k]
        error[k] += gain * old
        output[k] = old + gain * hidden[k]
    return logit


@compiled
def predict(
    hidden: Any,
    error: Any,
    outputs: Any,
    word: int,
    rate: Any,
    draws: Any,
    paths: Any,
    looks: bool,
    state: Any,
) -> Any:
    """All predictions of one word from ``hidden``.

    ``draws``: rows and ``other``s of the alias table, how many; ``paths``: starts, nodes, turns; no
    starts: negative sampling. Returns the loss, if it ``looks`` for it (logarithms take as long as
    all the rest), and the state of the random numbers.
    """
    zero, one = outputs.dtype.type(0), outputs.dtype.type(1)
    kept, other, negative = draws
    starts, nodes, turns = paths
    loss = 0.0
    if len(starts):
        for at in range(starts[word], starts[word + 1]):
            label = zero if turns[at] else one
            logit = step_towards(hidden, error, outputs[nodes[at]], label, rate)
            if looks:
                loss += _loss(logit, label)
        return loss, state
    logit = step_towards(hidden, error, outputs[word], one, rate)
    if looks:
        loss += _loss(logit, one)
    for _ in range(negative):
        state = _next(state)
        drawn = _draw(state, kept, other)
        if drawn != word:
            logit = step_towards(hidden, error, outputs[drawn], zero, rate)
            if looks:
                loss += _loss(logit, zero)
    return loss, state


@compiled
def _loss(logit: Any, label: Any) -> Any:
    signed = logit if label > 0 else -logit
    return np.log1p(np.exp(-abs(signed))) + max(-signed, 0.0)


@compiled
def _add(to: Any, step: Any) -> None:
    for k in range(len(step)):
        to[k] += step[k]


@compiled
def _thinned(numbers: Any, keep: Any, state: Any) -> Any:
    """A stretch after subsampling, and the state of the random numbers."""
    left = np.empty(len(numbers), np.int64)
    n = 0
    for number in numbers:
        if number >= 0:
            state = _next(state)
            if _uniform(state) >= keep[number]:
                continue
        left[n] = number
        n += 1
    return left[:n], state


@compiled
def _neighbours(left: Any, at: int, window: int, state: Any) -> Any:
    """First and last place of a window that is shortened at random (Mikolov 2013)."""
    state = _next(state)
    reach = 1 + np.int64((state >> np.uint64(33)) % np.uint64(window))
    first, last = at, at
    while first > 0 and at - first < reach and left[first - 1] >= 0:
        first -= 1
    while last + 1 < len(left) and last - at < reach and left[last + 1] >= 0:
        last += 1
    return first, last, state


@compiled
def skip_gram(
    inputs: Any,
    outputs: Any,
    numbers: Any,
    keep: Any,
    draws: Any,
    paths: Any,
    window: int,
    rate: Any,
    seed: int,
) -> Any:
    """Each word predicts each of its neighbours; returns sum and number of the losses seen."""
    left, state = _thinned(numbers, keep, _seeded(seed))
    error = np.empty(inputs.shape[1], inputs.dtype)
    loss, seen, made = 0.0, 0, 0
    for at in range(len(left)):
        if left[at] < 0:
            continue
        first, last, state = _neighbours(left, at, window, state)
        hidden = inputs[left[at]]
        for near in range(first, last + 1):
            if near == at:
                continue
            error[:] = 0
            looks = made % _LOOKS_EVERY == 0
            word = left[near]
            found, state = predict(hidden, error, outputs, word, rate, draws, paths, looks, state)
            _add(hidden, error)
            loss += found
            seen += looks
            made += 1
    return loss, seen


@compiled
def cbow(
    inputs: Any,
    outputs: Any,
    numbers: Any,
    keep: Any,
    draws: Any,
    paths: Any,
    window: int,
    rate: Any,
    seed: int,
) -> Any:
    """The mean of its neighbours predicts each word; returns sum and number of the losses seen.

    Each neighbour gets the whole step that the mean should make, as in the authors' program.
    """
    left, state = _thinned(numbers, keep, _seeded(seed))
    one = inputs.dtype.type(1)
    hidden, error = np.empty(inputs.shape[1], inputs.dtype), np.empty(inputs.shape[1], inputs.dtype)
    loss, seen, made = 0.0, 0, 0
    for at in range(len(left)):
        if left[at] < 0:
            continue
        first, last, state = _neighbours(left, at, window, state)
        if first == last:
            continue
        hidden[:] = 0
        error[:] = 0
        share = one / inputs.dtype.type(last - first)
        for near in range(first, last + 1):
            if near != at:
                _add(hidden, inputs[left[near]])
        for k in range(len(hidden)):
            hidden[k] *= share
        looks = made % _LOOKS_EVERY == 0
        found, state = predict(hidden, error, outputs, left[at], rate, draws, paths, looks, state)
        for near in range(first, last + 1):
            if near != at:
                _add(inputs[left[near]], error)
        loss += found
        seen += looks
        made += 1
    return loss, seen


# ---- GloVe: one entry of the table after the other ----------------------------------------------

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
