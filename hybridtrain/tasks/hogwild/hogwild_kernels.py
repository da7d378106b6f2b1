"""The steps of the three problems, one example after the other, compiled by numba.

Each is plain gradient descent on one example's share of the objective, at the parameters as they
are: other processes may write to them meanwhile.

Legend: F features, B examples, N nonzero features of them, U users, I items, K classes, E edges.
"""

from __future__ import annotations

from typing import Any

from hybridtrain.util.compiling import compiled

Array = Any  # numpy.ndarray; numba knows the types


@compiled
def svm(
    weights: Array,  # (F,)
    places: Array,  # (B,) which examples
    rows: tuple[Array, Array, Array, Array],  # of all: labels, starts, features, values
    shrink: Array,  # (F,) regularization of a feature, for one example that has it
    rate: float,
) -> None:
    """Hinge loss; the features of an example are those that shrink."""
    labels, starts, features, values = rows
    of_type = weights.dtype.type
    step = of_type(rate)
    for example in places:
        first, last = starts[example], starts[example + 1]
        score = of_type(0)
        for n in range(first, last):
            score += weights[features[n]] * values[n]
        push = step * labels[example] if labels[example] * score < 1 else of_type(0)
        for n in range(first, last):
            feature = features[n]
            old = weights[feature]
            weights[feature] = old + push * values[n] - step * shrink[feature] * old


@compiled
def completion(
    left: Array,  # (U, D)
    right: Array,  # (I, D)
    users: Array,  # (B,)
    items: Array,  # (B,)
    ratings: Array,  # (B,) less their mean
    shrink_left: Array,  # (U,)
    shrink_right: Array,  # (I,)
    rate: float,
) -> None:
    """Squared error of a product of two rows."""
    dim = left.shape[1]
    for example in range(len(users)):
        u, i = users[example], items[example]
        error = -ratings[example]
        for d in range(dim):
            error += left[u, d] * right[i, d]
        for d in range(dim):
            one, other = left[u, d], right[i, d]
            left[u, d] = one - rate * (error * other + shrink_left[u] * one)
            right[i, d] = other - rate * (error * one + shrink_right[i] * other)


@compiled
def cuts(
    places: Array,  # (nodes, K), each on the simplex
    ones: Array,  # (B,) one end of each edge
    others: Array,  # (B,) and the other
    weights: Array,  # (B,)
    fixed: Array,  # (nodes,) of terminals, which stay
    rate: float,
) -> None:
    """Half the sum of absolute differences; each end is projected back onto the simplex."""
    classes = places.shape[1]
    for edge in range(len(ones)):
        u, v = ones[edge], others[edge]
        step = rate * weights[edge] * 0.5
        for k in range(classes):
            difference = places[u, k] - places[v, k]
            move = step if difference > 0 else (-step if difference < 0 else 0.0)
            if not fixed[u]:
                places[u, k] -= move
            if not fixed[v]:
                places[v, k] += move
        if not fixed[u]:
            project(places, u)
        if not fixed[v]:
            project(places, v)


@compiled
def project(places: Array, row: int) -> None:
    """The nearest point of the simplex: shift all by one number, and cut off below 0.

    Newton's method on the shift, which rises to its value in at most K steps.
    """
    classes = places.shape[1]
    total = 0.0
    for k in range(classes):
        total += places[row, k]
    shift, count = (total - 1.0) / classes, classes
    while True:
        above, n = 0.0, 0
        for k in range(classes):
            if places[row, k] > shift:
                above += places[row, k]
                n += 1
        if n == 0:  # rounding, or a write of another process, in between
            break
        shift = (above - 1.0) / n
        if n >= count:
            break
        count = n
    for k in range(classes):
        places[row, k] = max(places[row, k] - shift, 0.0)
