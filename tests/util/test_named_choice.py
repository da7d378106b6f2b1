"""Parts by name."""

from __future__ import annotations

import pytest

from hybridtrain import HybridStrategy
from hybridtrain.engine.policies import make_policy
from hybridtrain.errors import UserError


def test_a_parameter_of_another_choice_is_told_whose_it_is() -> None:
    whose = "hybrid takes no parameters, k is one of backup, k_async, k_batch_sync, k_batch_async"
    with pytest.raises(UserError, match=whose):
        make_policy({"name": "hybrid", "k": 3})


@pytest.mark.parametrize("part", ["policy", "exchange", "update", "correction"])
def test_a_name_without_end_is_shown_in_part(part: str) -> None:
    with pytest.raises(UserError, match="was given") as refused:
        HybridStrategy(**{part: "x" * 100_000})
    assert len(str(refused.value)) < 2000
