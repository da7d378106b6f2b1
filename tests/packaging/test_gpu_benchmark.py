"""The benchmark's part for a GPU: what it brings home, the largest model, who is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import frame, rows, runs
from benchmarks.jobs import gpu_loops, gpu_models
from benchmarks.parts import gpu, gpu_largest

from hybridtrain.engine.memory.limits import Gpu
from hybridtrain.errors import UserError
from hybridtrain.lightning.results import worker_result

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning")


@pytest.mark.slow
def test_the_benchmark_gets_neither_weights_nor_moments_back_from_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_loops, "use_all_cores", lambda: None)
    fill = worker_result.fill

    def weighed(path: str, content: Any) -> bytes:
        Path("brought").write_text(str(len(fill("", content))))
        return fill(path, content)

    monkeypatch.setattr(worker_result, "fill", weighed)
    model = {"width": 64, "depth": 1, "length": 8}
    assert gpu_loops.hybrid(model, 2, {}, "cpu")["step_s"] > 0
    assert int(Path("brought").read_text()) < 20_000 < gpu_models.parameters_of(model)


# ---- the largest model ---------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 5, 8, 11, 20, 47, 200, 400])
def test_the_most_layers_are_found_to_an_eighth(most: int) -> None:
    tried: list[int] = []

    def fits(depth: int) -> bool:
        tried.append(depth)
        return depth <= most

    found = gpu_largest.largest(fits)
    assert found <= most and (most - found <= max(1, most // 8) or found == 256)
    assert len(tried) <= 9 and len(set(tried)) == len(tried)


def test_a_gpu_on_which_not_one_layer_fits_is_reported() -> None:
    with pytest.raises(UserError, match="not even one layer fits"):
        gpu_largest.largest(lambda depth: False)


@pytest.mark.parametrize(
    ("error", "fits"),
    [
        (None, True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), False),
        (RuntimeError("worker 0: CUDA out of memory"), False),
    ],
)
def test_what_is_out_of_memory_does_not_fit(
    error: Exception | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def train(model: dict[str, int], samples: int, options: dict[str, Any]) -> None:
        given.append((model["depth"], options))
        if error is not None:
            raise error

    monkeypatch.setattr(gpu_loops, "hybrid", train)
    assert gpu_largest.fits("hybrid", 2, 0.25) is fits
    assert given == [(2, {"device_memory_fraction": 0.25})]


def test_what_fails_otherwise_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(gpu_loops, "hybrid", fails)
    with pytest.raises(RuntimeError, match="unspecified"):
        gpu_largest.fits("hybrid", 2, 0.25)


class Fits(runs.Runner):
    """Plain training takes twice the memory; DeepSpeed is not installed."""

    def __init__(self) -> None:
        pass

    def run(self, job: runs.Job) -> Any:
        most = {"hybrid": 40, "torchao": 40, "plain": 20, "ddp": 20}
        way, depth = job.arguments["way"], job.arguments["depth"]
        if way not in most:
            raise UserError("deepspeed cannot be imported")
        assert job.arguments["share"] == pytest.approx(0.05)
        return depth <= most[way]


def test_each_installed_contender_has_a_row_and_each_missing_one_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_largest, "chosen", lambda devices: [Gpu(80 * 2**30, 9)])
    found = list(gpu_largest.rows(frame.Frame("gpu", frame.Options(), Fits())))
    (absent,) = [each for each in found if isinstance(each, rows.Skipped)]
    assert "DeepSpeed" in absent.work and absent.reason == "deepspeed cannot be imported"
    ratios = {each.baseline: each.ratio for each in found if isinstance(each, rows.Row)}
    assert len(ratios) == 3 and ratios["torchao CPUOffloadOptimizer"] == 1.0
    assert 1.8 < (ratios["plain fused AdamW on the GPU"] or 0) < 2.1


def test_a_contender_that_is_not_installed_has_a_line_in_place_of_each_row_of_steps() -> None:
    class Absent(runs.Runner):
        def __init__(self) -> None:
            pass

        def run(self, job: runs.Job) -> Any:
            if "DeepSpeed" in job.label:
                raise UserError("deepspeed cannot be imported")
            return {"step_s": 1.0, "samples_per_s": 8.0, "peak_bytes": 2**30}

    works = gpu.against_others(frame.Frame("gpu", frame.Options(), Absent()), {}, 8, "work")
    reasons = [each.reason for each in works if isinstance(each, rows.Skipped)]
    assert reasons == ["deepspeed cannot be imported"] * 3
