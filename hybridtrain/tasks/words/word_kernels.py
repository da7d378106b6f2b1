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
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from hybridtrain.util.compiling import compiled, inlined

_LOOKS_EVERY = 16  # predictions, of which one is looked at for the loss
_FRACTION = 2.0**-24
_LINE_BYTES = 64
_LONG, _INT, _POINTER = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()


def _fetch(typing: Any, table: Any, row: Any) -> Any:
    """Ask for a row of ``table`` (V, D) before it is written to.

    Workers write to the same rows, so that half of the time another core's cache has the newest.
    Waiting for it takes as long as the arithmetic; asked for one prediction ahead, it is there.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, arguments[0])
        width = cgutils.unpack_tuple(builder, array.strides, kind.ndim)[0]
        start = builder.ptrtoint(array.data, _LONG)
        start = builder.add(start, builder.mul(arguments[1], width))
        taken = ir.FunctionType(ir.VoidType(), [_POINTER, _INT, _INT, _INT])
        prefetch = cgutils.get_or_insert_function(builder.module, taken, "llvm.prefetch.p0i8")
        write, keep, data = (ir.Constant(_INT, number) for number in (1, 3, 1))
        lines = cgutils.for_range_slice(builder, _LONG(0), width, _LONG(_LINE_BYTES))
        with lines as (offset, _):
            place = builder.inttoptr(builder.add(start, offset), _POINTER)
            builder.call(prefetch, [place, write, keep, data])
        return context.get_dummy_value()

    return types.none(table, types.int64), generate


fetch: Any = intrinsic(_fetch)


@inlined
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


@inlined
def _uniform(state: Any) -> Any:
    """Convert a random state to a uniform number in [0, 1), with 24 bits."""
    return np.float32(state >> np.uint64(40)) * np.float32(_FRACTION)


@inlined
def _draw(state: Any, kept: Any, other: Any) -> Any:
    """A row of the alias table, by all bits, without a branch, which a core often guesses wrong."""
    row = np.int64(((state >> np.uint64(32)) * np.uint64(len(kept))) >> np.uint64(32))
    low = np.float32(state & np.uint64(0xFFFFFF)) * np.float32(_FRACTION)
    return row + (np.int64(other[row]) - row) * np.int64(low >= kept[row])


@inlined
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


@inlined
def _targets(word: int, outputs: Any, draws: Any, paths: Any, ahead: Any, state: Any) -> Any:
    """Rows of ``outputs`` that predict ``word``, with labels: how many, and the random state.

    ``draws``: rows and ``other``s of the alias table, how many; ``paths``: starts, nodes, turns;
    ``None``: negative sampling. ``ahead``: rows and labels that are filled in.
    """
    kept, other, negative = draws
    rows, labels = ahead
    if paths is not None:
        starts, nodes, turns = paths
        first = starts[word]
        n = starts[word + 1] - first
        for k in range(n):
            rows[k], labels[k] = nodes[first + k], 1 - turns[first + k]
            fetch(outputs, rows[k])
        return n, state
    rows[0], labels[0] = word, 1
    fetch(outputs, word)
    n = 1
    for _ in range(negative):
        state = _next(state)
        drawn = _draw(state, kept, other)
        if drawn != word:
            rows[n], labels[n] = drawn, 0
            fetch(outputs, drawn)
            n += 1
    return n, state


@inlined
def _predict(
    hidden: Any, error: Any, outputs: Any, targets: Any, n: int, rate: Any, looks: bool
) -> Any:
    """Make ``n`` predictions from ``hidden``.

    Returns the loss, if it ``looks`` for it (logarithms take as long as all the rest).
    """
    rows, labels = targets
    loss = 0.0
    error[:] = 0
    for k in range(n):
        logit = step_towards(hidden, error, outputs[rows[k]], labels[k], rate)
        if looks:
            loss += _loss(logit, labels[k])
    return loss


@compiled
def _room(inputs: Any, draws: Any, paths: Any) -> Any:
    """Twice the rows and labels of as many predictions as a word has at most: (2, n) each."""
    most = draws[2] + 1
    if paths is not None:
        starts = paths[0]
        for word in range(len(starts) - 1):
            most = max(most, starts[word + 1] - starts[word])
    return np.empty((2, most), np.int64), np.empty((2, most), inputs.dtype)


@inlined
def _loss(logit: Any, label: Any) -> Any:
    signed = logit if label > 0 else -logit
    return np.log1p(np.exp(-abs(signed))) + max(-signed, 0.0)


@inlined
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
    rows, labels = _room(inputs, draws, paths)
    loss, seen, made, now = 0.0, 0, 0, 0
    for at in range(len(left)):
        if left[at] < 0:
            continue
        first, last, state = _neighbours(left, at, window, state)
        near = first + (first == at)
        if near > last:
            continue
        hidden = inputs[left[at]]
        targets = rows[now], labels[now]
        n, state = _targets(left[near], outputs, draws, paths, targets, state)
        while near <= last:
            near += 1 + (near + 1 == at)
            following = 0
            if near <= last:
                ahead = rows[1 - now], labels[1 - now]
                following, state = _targets(left[near], outputs, draws, paths, ahead, state)
            looks = made % _LOOKS_EVERY == 0
            targets = rows[now], labels[now]
            loss += _predict(hidden, error, outputs, targets, n, rate, looks)
            _add(hidden, error)
            seen += looks
            made += 1
            n, now = following, 1 - now
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
    rows, labels = _room(inputs, draws, paths)
    targets = rows[0], labels[0]
    loss, seen, made = 0.0, 0, 0
    for at in range(len(left)):
        if left[at] < 0:
            continue
        first, last, state = _neighbours(left, at, window, state)
        if first == last:
            continue
        n, state = _targets(left[at], outputs, draws, paths, targets, state)
        hidden[:] = 0
        share = one / inputs.dtype.type(last - first)
        for near in range(first, last + 1):
            if near != at:
                _add(hidden, inputs[left[near]])
        for k in range(len(hidden)):
            hidden[k] *= share
        looks = made % _LOOKS_EVERY == 0
        loss += _predict(hidden, error, outputs, targets, n, rate, looks)
        for near in range(first, last + 1):
            if near != at:
                _add(inputs[left[near]], error)
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
