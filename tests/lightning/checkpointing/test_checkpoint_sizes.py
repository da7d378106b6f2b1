"""A checkpoint takes no more memory than it has content for, and states have the right shapes."""

from __future__ import annotations

import copy
import io
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from hybridtrain.cli.validation.checkpoint_checks import check_checkpoint, load_checkpoint
from hybridtrain.errors import UserError
from hybridtrain.lightning.checkpointing import checkpoint_sizes
from hybridtrain.lightning.checkpointing.checkpoint_content import check_content
from hybridtrain.lightning.checkpointing.checkpoint_io import WholeCheckpointIO
from hybridtrain.lightning.checkpointing.checkpoint_sizes import check_shapes, check_sizes
from hybridtrain.standalone.saved_run import _is_plain
from hybridtrain.util.files import fault_of
from tests.cli.tiny import TinyData
from tests.fuzzing.mutations import _put, faults, places
from tests.fuzzing.test_checkpoints import Scheduled
from tests.lightning.checkpointing.test_checkpoint_content import CASES, content_after_steps
from tests.lightning.toys import make_trainer

GIB_3 = 3 * 2**28  # elements of float32
STRATEGIES = ["hybrid", "async", "local_sgd", "diloco", "streaming_diloco", "downpour", "sign_sgd"]


Saved = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint that two workers have left in the middle of an epoch, by strategy."""

    @cache
    def made(strategy: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("saved")
        saving = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        options: dict[str, Any] = {"callbacks": [saving], "enable_checkpointing": True}
        make_trainer(strategy, 2, max_epochs=1, **options).fit(Scheduled(), datamodule=TinyData())
        path = min(folder.glob("*.ckpt"), key=lambda x: x.stat().st_mtime_ns)
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found

    return lambda strategy: copy.deepcopy(made(strategy))


def tensors(content: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for path in places(content):
        value: Any = content
        for key in path:
            value = value[key]
        if isinstance(value, torch.Tensor):
            yield path


def expanded(n: int) -> torch.Tensor:
    return torch.zeros(1).expand(n)


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tensor_of_a_few_bytes_that_stands_for_gigabytes_is_refused_wherever_it_is(
    strategy: str, saved: Saved, tmp_path: Path
) -> None:
    content = saved(strategy)
    everywhere = [*tensors(content), ("mine",), ("callbacks", "mine"), ("hyper_parameters",)]
    everywhere += [("optimizer_states", 0, "state", 0, "mine"), ("lr_schedulers", 0, "mine")]
    path = tmp_path / "x.ckpt"

    def case(draw: random.Random, number: int) -> None:
        place = everywhere[number]
        torch.save(_put(content, place, expanded(GIB_3)), path)
        with pytest.raises(UserError) as said:
            check_content(torch.load(path, weights_only=True), "ckpt=x.ckpt", number % 2 == 0)
        shape = "is a tensor of shape (805306368,), which takes 3.0 GiB"
        called = ".".join(str(key)[:80] for key in place)
        assert f"damaged: checkpoint.{called} {shape}" in str(said.value)
        load_checkpoint(path)

    ends, found = faults(case, len(everywhere), "sizes")
    assert not found and ends == {"refused": len(everywhere)}, "\n".join(found[:5])


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["fit", "validate", "test", "predict"])
def test_a_tensor_that_stands_for_terabytes_is_refused_before_a_worker_copies_it(
    kind: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = saved("hybrid")
    content["optimizer_states"][0]["state"][0]["mine"] = expanded(2**44)
    torch.save(content, tmp_path / "x.ckpt")
    run = getattr(make_trainer("hybrid", 2, max_epochs=2), kind)
    given: dict[str, Any] = {"datamodule": TinyData(), "ckpt_path": tmp_path / "x.ckpt"}
    if kind == "predict":
        monkeypatch.setattr(Scheduled, "forward", Scheduled.training_step)
        given = {"dataloaders": TinyData().val_dataloader(), "ckpt_path": tmp_path / "x.ckpt"}
    with pytest.raises(UserError, match=r"state\.0\.mine is a tensor .* takes 65,536\.0 GiB"):
        run(Scheduled(), **given, weights_only=True)


def test_many_views_of_one_storage_count_each_where_nothing_can_be_tied() -> None:
    content = content_after_steps("Adam")
    shared = torch.zeros(2**18)
    content["optimizer_states"][0]["state"][0] |= {f"x{n}": shared for n in range(100)}
    with pytest.raises(
        UserError, match=r"all tensors together 100\.0 MiB, and the file holds 1\.0"
    ):
        check_sizes(content, "ckpt=x.ckpt")
    shifted = {str(n): torch.zeros(2**20)[n:] for n in range(2)}
    whole = torch.zeros(2**20)
    check_sizes({"state_dict": shifted}, "ckpt=x.ckpt")
    with pytest.raises(UserError):
        check_sizes({"state_dict": {str(n): whole[n:] for n in range(50)}}, "ckpt=x.ckpt")


def test_a_storage_that_the_file_does_not_hold_lifts_no_limit() -> None:
    content = {"a": torch.zeros(2**20)}
    check_sizes(content, "ckpt=x.ckpt", 2**22)
    with pytest.raises(UserError, match=r"4\.0 MiB, and the file holds 1,000 bytes of them"):
        check_sizes(content, "ckpt=x.ckpt", 1000)


def in_itself(depth: int, width: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made] * width
    return made


@pytest.mark.parametrize(
    "value", [in_itself(200, 1), in_itself(12, 10), torch.empty(2**40, device="meta")]
)
def test_containers_and_tensors_without_content_are_bounded_too(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_sizes, "_MOST_CONTAINERS", 10_000)
    with pytest.raises(UserError, match="the file was changed or is damaged") as said:
        check_sizes({"callbacks": {"x": value}}, "ckpt=x.ckpt")
    assert len(str(said.value)) < 400


WEIGHT = torch.zeros(2**18)
GOOD: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "tied weights": lambda: {f"layers.{n}.weight": WEIGHT for n in range(100)},
    "an expanded mask": lambda: {"w": WEIGHT, "mask": torch.ones(1).expand(2**18)},
    "parts of a flat buffer": lambda: {str(n): x for n, x in enumerate(WEIGHT.split(2**10))},
    "transposed": lambda: {"w": WEIGHT.view(2**9, 2**9).T},
    "a graph": lambda: {"a": torch.sparse_coo_tensor([[1], [2]], [3.0], (10**6, 10**6))},
    "rows of a sparse matrix": lambda: {"a": torch.eye(50).to_sparse_csr()},
    "empty": lambda: {"a": torch.zeros(0, 5)},
    "complex, bool": lambda: {"a": torch.zeros(5, dtype=torch.cfloat), "b": torch.ones(9) > 0},
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", GOOD)
def test_what_users_save_is_taken(kind: str, tmp_path: Path) -> None:
    torch.save({"state_dict": GOOD[kind]()}, tmp_path / "x.ckpt")
    load_checkpoint(tmp_path / "x.ckpt")


# ---- bytes that stand for more, before anything is loaded ----------------------------------------


def archive(path: Path, pickled: bytes, packing: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", packing) as made:
        made.writestr("x/data.pkl", pickled)
        made.writestr("x/version", "3\n")


def call(function: str, n: int) -> bytes:
    named = function.replace(".", "\n").encode()
    return b"\x80\x02c" + named + b"\nJ" + struct.pack("<i", n) + b"\x85R."


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("function", ["builtins.bytearray", "torch.Tensor", "torch.FloatTensor"])
def test_a_call_that_takes_memory_is_refused_unread(
    function: str, old: bool, tmp_path: Path
) -> None:
    """``torch.load`` allows both with ``weights_only``; ``torch.save`` writes neither."""
    path, pickled = tmp_path / "x.ckpt", call(function, 2**30)
    if old:
        ahead = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
        path.write_bytes(b"".join(pickle.dumps(x, protocol=2) for x in ahead) + pickled)
    else:
        archive(path, pickled)

    def case(draw: random.Random, number: int) -> None:
        load_checkpoint(path)

    named = function.removeprefix("builtins.")
    ends, found = faults(case, 1, "calls")
    assert not found and ends == {"refused": 1}
    with pytest.raises(UserError, match=rf"it calls {named}, for memory beside its content"):
        load_checkpoint(path)
    with pytest.raises(UserError, match=rf"it calls {named}, for memory beside its content"):
        make_trainer("hybrid", 1).fit(Scheduled(), datamodule=TinyData(), ckpt_path=path)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(function: str) -> bytes:
    module, _, name = function.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def called(function: str, *args: bytes) -> bytes:
    return named(function) + b"(" + b"".join(args) + b"tR"


def nested(depth: int, encoding: str) -> bytes:
    made = called("_codecs.encode", text("A" * 64), text("latin1"))
    for _ in range(depth):
        made = called("_codecs.encode", made, text(encoding))
    return made


def repeated(function: str, *args: bytes) -> bytes:
    """A list of calls that copy one argument again and again."""
    made = named(function) + b"q\x00(" + b"".join(args) + b"tq\x01R"
    return b"](" + made + 1000 * b"h\x00h\x01R" + b"e"


MANY = b"J" + struct.pack("<i", 2**30)
PLACE = b"(" + text("storage") + named("torch.FloatStorage") + text("0") + text("cpu")
OF_TYPE = "torch._tensor._rebuild_from_type_v2"
WITHOUT_CONTENT = {
    "nested encodings": nested(26, "hex"),
    "nested encodings as latin1": nested(1, "latin1"),
    "punycode": called("_codecs.encode", text("a"), text("punycode")),
    "an encoding whose arguments are a list": named("_codecs.encode")
    + b"]("
    + text("a")
    + text("hex")
    + b"eR",
    "one text encoded many times": repeated("_codecs.encode", text("A" * 9000), text("latin1")),
    "one list copied many times": repeated("builtins.set", b"](" + 9000 * b"N" + b"e"),
    "bytearray by its old name": called("__builtin__.bytearray", MANY),
    "TypedStorage": called("torch.storage.TypedStorage", MANY),
    "UntypedStorage": called("torch.storage.UntypedStorage", MANY),
    "FloatStorage": called("torch.FloatStorage", MANY),
    "FloatStorage made anew": named("torch.FloatStorage") + MANY + b"\x85\x81",
    "FloatStorage by the memo": named("torch.FloatStorage") + b"q\x00h\x00" + MANY + b"\x85R",
    "TypedStorage by another call": called(
        OF_TYPE, named("torch.storage.TypedStorage"), b"N", MANY + b"\x85", b"N"
    ),
    "another device's tensor": called("torch._utils._rebuild_device_tensor_from_cpu_tensor"),
    "a storage larger than the file": PLACE + MANY + b"tQ",
    "a storage without a size": PLACE + b"\x88tQ",
}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", WITHOUT_CONTENT)
def test_what_takes_memory_without_content_is_refused_unread(
    kind: str, old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where ``torch.load`` allows it with ``weights_only``."""
    path, pickled = tmp_path / "x.ckpt", b"\x80\x02" + WITHOUT_CONTENT[kind] + b"."
    if old:
        ahead = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
        path.write_bytes(b"".join(pickle.dumps(x, protocol=2) for x in ahead) + pickled)
    else:
        archive(path, pickled)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(
        UserError, match=r"memory beside|more elements than the file|as torch\.save"
    ):
        load_checkpoint(path)


SAVED = {
    "bytes": [b"abc\xff", [b"abc"] * 100, b"\x00" * 10_000],
    "sets and sizes": [{1, 2}, torch.Size((1, 2)), 1j, torch.device("cpu"), torch.float32],
    "parameters": nn.Parameter(torch.ones(3)),
    "one storage twice": [WEIGHT[:5], WEIGHT[5:]],
    "a tensor with attributes": torch.ones(2),
}
SAVED["a tensor with attributes"].mine = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", SAVED)
def test_each_call_that_torch_save_writes_is_made(kind: str, old: bool, tmp_path: Path) -> None:
    content = {"mine": SAVED[kind], "state_dict": {"w": torch.ones(3)}}
    torch.save(content, tmp_path / "x.ckpt", _use_new_zipfile_serialization=not old)
    assert repr(load_checkpoint(tmp_path / "x.ckpt")) == repr(content)


def test_a_packed_archive_is_refused_unread(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save({"a": torch.zeros(2**20)}, content)
    with (
        zipfile.ZipFile(content) as plain,
        zipfile.ZipFile(tmp_path / "x.ckpt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert fault_of(tmp_path / "x.ckpt") == "its data.pkl is packed, and torch.save packs nothing"


def test_a_saved_server_holds_no_overlapping_views() -> None:
    assert _is_plain(torch.zeros(4, 5).T)
    assert not _is_plain(torch.zeros(1).expand(5))
    assert not _is_plain(torch.zeros(100).as_strided((50, 50), (1, 1)))


# ---- shapes --------------------------------------------------------------------------------------


def optimizer_of(kind: str, **options: Any) -> torch.optim.Optimizer:
    weights = [nn.Parameter(torch.ones(3, 2)) for _ in range(3 if kind == "LBFGS" else 4)]
    groups: Any = [{"params": weights[:2]}, {"params": weights[2:]}]
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(
        weights if kind == "LBFGS" else groups, **options
    )
    return made


def of_other_shapes(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state with one tensor after the other in another shape."""
    for path in list(tensors(state["state"])):
        value: Any = state["state"]
        for key in path:
            value = value[key]
        if value.dim():
            changed = copy.deepcopy(state)
            changed["state"] = _put(changed["state"], path, torch.zeros(5, 7))
            yield str(path[1]), changed


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_states_of_torchs_optimizers_have_the_shapes_that_they_make(
    kind: str, options: dict[str, Any]
) -> None:
    (state,) = content_after_steps(kind, **options)["optimizer_states"]
    optimizer = optimizer_of(kind, **options)
    check_shapes(optimizer, state, "ckpt")
    for name, changed in of_other_shapes(state):
        with pytest.raises(UserError, match=rf"^ckpt: {name} of the .* has shape \(5, 7\)"):
            check_shapes(optimizer, changed, "ckpt")


class Factors(torch.optim.Optimizer):
    """Keeps a square matrix for each dimension, as Shampoo does."""


def test_an_optimizer_of_the_users_own_keeps_what_it_likes() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    state = {
        "state": {0: {"left": torch.eye(3), "right": torch.eye(2), "exp_avg": torch.ones(1, 2)}}
    }
    check_shapes(Factors([weight], {}), state, "ckpt")


def resumed(strategy: str, content: dict[str, Any], path: Path) -> None:
    torch.save(content, path)
    made = make_trainer(strategy, 2, max_epochs=1)
    made.fit(Scheduled(), datamodule=TinyData(), ckpt_path=path, weights_only=True)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "part"),
    [
        *(("hybrid", part) for part in ("state.0.exp_avg", "state.3.step")),
        ("async", "state.2.exp_avg_sq"),
        *(("local_sgd", f"workers.1.{x}") for x in ("state.1.exp_avg", "parameters.0")),
        ("diloco", "workers.0.parameters.2"),
        ("streaming_diloco", "workers.1.state.0.exp_avg"),
        ("downpour", "masters.state.1.exp_avg"),
    ],
)
def test_a_state_of_another_shape_than_its_parameter_is_one_line(
    strategy: str, part: str, saved: Saved, tmp_path: Path
) -> None:
    content = saved(strategy)
    keys = [int(key) if key.isdecimal() else key for key in part.split(".")]
    path = ("optimizer_states", 0, *keys)
    assert path in list(tensors(content))
    changed = _put(content, path, torch.ones(3, 7))
    if part.endswith("exp_avg"):  # both, or they differ from one another
        changed = _put(changed, (*path[:-1], "exp_avg_sq"), torch.ones(3, 7))
    with pytest.raises(UserError) as said:
        resumed(strategy, changed, tmp_path / "x.ckpt")
    assert "(3, 7)" in str(said.value) and "\n" not in str(said.value)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_tensor_of_another_shape_is_one_line_or_not_the_optimizers(
    strategy: str, saved: Saved, tmp_path: Path
) -> None:
    warnings.simplefilter("ignore")
    content = saved(strategy)
    resumed(strategy, content, tmp_path / "x.ckpt")
    for path in [x for x in tensors(content) if x[0] in ("optimizer_states", "hybridtrain")]:
        with pytest.raises(UserError) as said:
            resumed(strategy, _put(content, path, torch.ones(3, 7)), tmp_path / "x.ckpt")
        assert "\n" not in str(said.value), path


def test_callbacks_of_a_checkpoint_delete_nothing_outside_of_their_folder(tmp_path: Path) -> None:
    """Lightning takes ``run/../thesis`` for a file in ``run``."""
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis").mkdir()
    writer = WholeCheckpointIO()
    with pytest.warns(UserWarning, match="thesis is not deleted"):
        writer.remove_checkpoint(tmp_path / "run/../thesis")
    assert (tmp_path / "thesis").is_dir()
    writer.teardown()


RESTS: dict[str, dict[str, Any]] = {
    "spans beyond the order": {"spans": [[0, 2**40]]},
    "spans that overlap": {"spans": [[0, 20], [8, 24]]},
    "a span without an end": {"spans": [[5]]},
    "a span that ends before it begins": {"spans": [[20, 8]]},
    "indices that are no numbers": {"indices": torch.ones(24)},
    "spans beyond the indices": {"indices": torch.arange(10), "spans": [[0, 24]]},
    "mini-batches of more than there is": {"indices": torch.arange(24), "sizes": [20, 20]},
}


@pytest.mark.parametrize("kind", RESTS)
def test_the_rest_of_an_epoch_is_bounded_before_it_is_drawn(kind: str, saved: Saved) -> None:
    """Two numbers may stand for 2⁴⁰ samples, which took all memory."""
    content = saved("hybrid")
    check_content(content, "ckpt=x.ckpt", True)
    content["hybridtrain"]["loaders"][0] |= RESTS[kind]
    with pytest.raises(UserError, match=r"is damaged: a loader's ") as said:
        check_content(content, "ckpt=x.ckpt", True)
    assert "\n" not in str(said.value) and len(str(said.value)) < 300


def test_a_large_weight_is_compared_with_the_modules_before_it_is_copied(
    saved: Saved, tmp_path: Path
) -> None:
    content = saved("hybrid")
    content["state_dict"]["net.0.weight"] = expanded(64)
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=r"net\.0\.weight has shape \(64,\) instead of"):
        check_checkpoint(tmp_path / "x.ckpt", Scheduled())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.to_sparse(), r"net\.0\.weight has shape .* in torch\.sparse_coo instead of"),
        (lambda x: x.to("meta"), r"net\.0\.weight has no content"),
    ],
)
def test_a_weight_that_is_sparse_or_has_no_content_is_one_line(
    change: Callable[[torch.Tensor], torch.Tensor], said: str, saved: Saved, tmp_path: Path
) -> None:
    content = saved("hybrid")
    content["state_dict"]["net.0.weight"] = change(content["state_dict"]["net.0.weight"])
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=said) as found:
        check_checkpoint(tmp_path / "x.ckpt", Scheduled())
    assert "\n" not in str(found.value)
