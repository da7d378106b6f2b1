"""What workers hand over, encoded: bytes, errors, and what is kept for the next time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridtrain.engine.exchanges import make_exchange
from hybridtrain.engine.exchanges.compression import (
    Compressor,
    bytes_of,
    decode,
    make_codec,
    pack,
    pack_places,
    unpack,
    unpack_places,
)
from hybridtrain.engine.exchanges.movement import Movement
from hybridtrain.errors import UserError

SIZES = (0, 1, 2, 63, 4095, 4096, 4097, 9000)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
TOP = {"name": "topk", "error_decay": 1.0}


def numbers(n: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    """Some large, most small, as movements are."""
    drawn = torch.randn(2, n, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return (drawn[0] * drawn[1].abs() ** 2).to(dtype)


def sent(compressor: Compressor, codec: Any, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the server reads of it."""
    encoded = compressor.offer(values, 1.0).encoded
    assert encoded is not None
    assert encoded.dtype == torch.uint8
    places = [torch.full_like(value, math.nan) for value in values]
    decode(codec, encoded, places)
    return places


# ---- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_numbers_come_out_again(bits: int) -> None:
    for n in (0, 1, 3, 4, 5, 1000):
        given = torch.randint(2**bits, (n,), dtype=torch.uint8)
        packed = pack(given, bits)
        assert len(packed) == math.ceil(n * bits / 8)
        assert torch.equal(unpack(packed, n, bits), given)


def test_packed_places_come_out_again() -> None:
    for n in (0, 1, 2, 7, 4096):
        given = torch.randint(4096, (n,))
        packed = pack_places(given)
        assert len(packed) == math.ceil(1.5 * n)
        assert torch.equal(unpack_places(packed, n), given)


# ---- bytes --------------------------------------------------------------------------------------


def bytes_by_hand(given: dict[str, Any], n: int, dtype: torch.dtype) -> int:
    """The format, written down again."""
    scale = 8 if dtype == F64 else 4
    if given["name"] in ("int8", "int4"):
        made = math.ceil(n / given["chunk"]) * scale + math.ceil(n * int(given["name"][3:]) / 8)
    else:
        chunks = [4096] * (n // 4096) + ([n % 4096] if n % 4096 else [])
        kept = sum(max(1, round(given["density"] * chunk)) for chunk in chunks)
        made = math.ceil(kept * 12 / 8)
        if given["bits"] is None:
            made += kept * dtype.itemsize
        else:
            made += len(chunks) * scale + math.ceil(kept * given["bits"] / 8)
    return min(made, n * dtype.itemsize)


CODECS: list[dict[str, Any]] = [
    {"name": "int8", "chunk": 4096},
    {"name": "int8", "chunk": 100},
    {"name": "int4", "chunk": 4096},
    {"name": "topk", "density": 1 / 64, "bits": 2},
    {"name": "topk", "density": 0.3, "bits": 4},
    {"name": "topk", "density": 0.01, "bits": 8},
    {"name": "topk", "density": 0.1, "bits": None},
    {"name": "topk", "density": 0.9, "bits": None},
]


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
@pytest.mark.parametrize("given", CODECS, ids=str)
def test_any_size_and_dtype_is_as_long_as_its_format_says_and_comes_out_again(
    given: dict[str, Any], dtype: torch.dtype
) -> None:
    codec: Any = make_codec(given)
    for n in SIZES:
        value = numbers(n, dtype)
        encoded = Compressor(codec).offer([value], 1.0).encoded
        assert encoded is not None
        assert len(encoded) == bytes_of(codec, (n,), dtype) == bytes_by_hand(given, n, dtype)
        (found,) = sent(Compressor(codec), codec, [value])
        assert found.isfinite().all()
        if n:
            largest = value.abs().max()
            assert (found - value).abs().max() <= largest
            assert float(found.abs().max()) == pytest.approx(float(largest), rel=0.01)


def test_small_parameters_share_chunks_and_large_ones_have_their_own() -> None:
    codec: Any = make_codec("topk")
    values = [numbers(n, dtype) for n, dtype in ((16, F32), (5000, F32), (9, F64), (3000, F32))]
    encoded = Compressor(codec).offer(values, 1.0).encoded
    assert encoded is not None
    wanted = [bytes_of(codec, (n,), F32) for n in (16 + 3000, 5000)] + [bytes_of(codec, (9,), F64)]
    assert len(encoded) == sum(wanted)


@pytest.mark.parametrize(("given", "ratio"), [("int8", 3.99), ("int4", 7.9), (TOP, 141.0)])
def test_a_large_parameter_takes_so_many_times_fewer_bytes(given: Any, ratio: float) -> None:
    codec: Any = make_codec(given)
    assert 4 * 2**20 / bytes_of(codec, (2**20,), F32) > ratio


def test_absent_and_empty_values_take_no_bytes() -> None:
    encoded = Compressor(make_codec("int8")).offer([None, torch.empty(0)], 1.0).encoded
    assert encoded is not None
    assert len(encoded) == 0


def test_any_shape_and_memory_format_comes_out_in_its_own() -> None:
    codec: Any = make_codec({"name": "int8", "chunk": 16})
    image = numbers(4 * 3 * 40 * 40).view(4, 3, 40, 40)
    last = image.to(memory_format=torch.channels_last)
    scalar = torch.tensor(2.5)
    one, other, alone = sent(Compressor(codec), codec, [image, last, scalar])
    assert torch.equal(one, other) and other.stride() == last.stride()
    assert torch.equal(alone, scalar)
    complex_one = torch.complex(numbers(5000), numbers(5000, seed=1))
    assert torch.equal(sent(Compressor(codec), codec, [complex_one])[0], complex_one)


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_whole_numbers_are_at_most_half_a_scale_off(
    name: str, levels: int, dtype: torch.dtype
) -> None:
    codec: Any = make_codec({"name": name, "chunk": 1000})
    value = numbers(9999, dtype)
    (found,) = sent(Compressor(codec), codec, [value])
    for chunk, decoded in zip(value.split(1000), found.split(1000), strict=True):
        scale = chunk.abs().max() / levels
        assert (decoded - chunk).abs().max() <= scale / 2 * (1 + 1e-5)


def test_int8_rounds_halves_to_even() -> None:
    codec: Any = make_codec({"name": "int8", "chunk": 5000})
    value = torch.zeros(5000)
    value[:6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    (found,) = sent(Compressor(codec), codec, [value])
    assert found[:6].tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]


@pytest.mark.parametrize("bits", [2, 4, 8, None])
def test_topk_keeps_the_largest_values_and_turns_none_of_them_into_zero(bits: int | None) -> None:
    codec: Any = make_codec({"name": "topk", "bits": bits})
    value = numbers(8192)
    (found,) = sent(Compressor(codec), codec, [value])
    for chunk, decoded in zip(value.split(4096), found.split(4096), strict=True):
        kept = decoded != 0
        assert int(kept.sum()) == 64
        assert chunk[kept].abs().min() >= chunk[~kept].abs().max()
        assert torch.equal(decoded[kept].sign(), chunk[kept].sign())
        step = 0 if bits is None else chunk.abs().max() / (2**bits - 1)
        assert (decoded - chunk)[kept].abs().max() <= step * (1 + 1e-5)


@pytest.mark.parametrize("given", CODECS, ids=str)
def test_zeros_stay_zeros(given: dict[str, Any]) -> None:
    codec: Any = make_codec(given)
    value = torch.zeros(5000)
    assert not sent(Compressor(codec), codec, [value])[0].any()
    value[[7, 4500]] = torch.tensor([3.0, -1e-30])
    (found,) = sent(Compressor(codec), codec, [value])
    assert set(found.nonzero().flatten().tolist()) <= {7, 4500}
    assert float(found[7]) == pytest.approx(3.0)
    for tiny in (2e-45, 2.5e-43):  # a scale cannot be as small, or as exact
        value = torch.full((5000,), tiny)
        (found,) = sent(Compressor(codec), codec, [value])
        assert found.min() >= 0 and found.max() < 1e-40


# ---- error feedback -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
@pytest.mark.parametrize("given", [TOP, TOP | {"bits": None}, "int4"], ids=str)
def test_values_sent_and_values_left_over_add_up_to_what_was_moved_without_decay(
    given: Any, dtype: torch.dtype
) -> None:
    """What was sent and what is left are what workers have moved."""
    codec: Any = make_codec(given)
    compressor = Compressor(codec)
    sums, moved = [torch.zeros(n, dtype=F64) for n in (50, 6000)], [0.0, 0.0]
    for step in range(20):
        values = [numbers(n, dtype, seed=step) for n in (50, 6000)]
        for total, found in zip(sums, sent(compressor, codec, values), strict=True):
            total += found
        moved = [m + value.to(F64) for m, value in zip(moved, values, strict=True)]
    left = compressor.state()
    for number, (total, wanted) in enumerate(zip(sums, moved, strict=True)):
        tolerance = 1e-12 if dtype == F64 else 2e-5
        torch.testing.assert_close(total + left[number], wanted, rtol=0, atol=tolerance)
        assert left[number].abs().max() > 0


def test_error_decay_shrinks_the_values_that_were_left_over() -> None:
    codec: Any = make_codec({"name": "topk", "bits": None, "density": 0.25, "error_decay": 0.5})
    compressor = Compressor(codec)
    first = sent(compressor, codec, [torch.tensor([8.0, 4.0, 2.0, 1.0])])[0]
    assert first.tolist() == [8.0, 0.0, 0.0, 0.0]
    assert compressor.state()[0].tolist() == [0.0, 4.0, 2.0, 1.0]
    assert sent(compressor, codec, [torch.zeros(4)])[0].tolist() == [0.0, 2.0, 0.0, 0.0]
    assert compressor.state()[0].tolist() == [0.0, 0.0, 1.0, 0.5]


def test_values_left_over_are_the_state_of_an_exchange_and_a_new_one_has_none() -> None:
    values = [numbers(50), numbers(6000)]
    one, other, new = (make_exchange({"name": "movement", "compress": "topk"}) for _ in range(3))
    assert isinstance(one, Movement) and isinstance(other, Movement) and isinstance(new, Movement)
    first = one.compressor.offer(values, 1.0).encoded
    other.load_state(one.state())
    for made, again in ((one, False), (other, False), (new, True)):
        encoded = made.compressor.offer(values, 1.0).encoded
        assert encoded is not None and first is not None
        assert torch.equal(encoded, first) is again
    assert torch.equal(one.state()["residuals"][1], other.state()["residuals"][1])


def test_a_parameter_that_was_absent_keeps_what_it_is_owed() -> None:
    codec: Any = make_codec(TOP)
    compressor = Compressor(codec)
    compressor.offer([numbers(50), numbers(60)], 1.0)
    owed = compressor.state()
    compressor.offer([None, numbers(60)], 1.0)
    assert torch.equal(compressor.state()[0], owed[0])
    assert not torch.equal(compressor.state()[1], owed[1])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_travels_as_it_is_and_leaves_no_trace(bad: float) -> None:
    compressor = Compressor(make_codec("topk"))
    compressor.offer([numbers(5000)], 1.0)
    owed = compressor.state()[0]
    values = [numbers(5000)]
    values[0][17] = bad
    offer = compressor.offer(values, 1.0)
    assert offer.encoded is None and offer.values is values
    assert torch.equal(compressor.state()[0], owed)


def test_what_has_no_weight_is_not_encoded() -> None:
    compressor = Compressor(make_codec("topk"))
    assert compressor.offer([numbers(5000)], 0.0).encoded is None
    assert not compressor.state()


def test_numbers_whose_sum_is_too_large_are_finite_all_the_same() -> None:
    codec: Any = make_codec("int8")
    large = torch.full((5000,), 3e38)
    assert torch.allclose(sent(Compressor(codec), codec, [large])[0], large)


# ---- what makes no sense ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ("topq", ["exchange.compress='topq'", "did you mean topk?", "int8, int4, topk"]),
        (3, ["exchange.compress=3", "int8, int4, topk"]),
        ({"density": 0.1}, ["without a name", "int4, int8, power_sgd, topk"]),
        ({"name": "topk", "densty": 0.1}, ["compress.densty", "did you mean density?"]),
        ({"name": "int8", "bits": 3}, ["compress.bits", "int8 takes chunk", "one of topk"]),
        ({"name": "int8", "chunk": 0}, ["compress.chunk=0", "from 1 on"]),
        ({"name": "topk", "density": 0}, ["compress.density=0 ", "above 0 and up to 1"]),
        ({"name": "topk", "density": 1.5}, ["compress.density=1.5", "above 0 and up to 1"]),
        ({"name": "topk", "density": "few"}, ["compress.density='few'", "above 0 and up to 1"]),
        ({"name": "topk", "density": math.nan}, ["compress.density=nan", "above 0 and up to 1"]),
        ({"name": "topk", "bits": 3}, ["compress.bits=3", "2, 4, 8, 32 or null"]),
        ({"name": "topk", "bits": True}, ["compress.bits=True", "2, 4, 8, 32 or null"]),
        ({"name": "topk", "error_decay": 1.1}, ["compress.error_decay=1.1", "from 0 to 1"]),
        ({"name": "topk", "error_decay": None}, ["compress.error_decay=None", "from 0 to 1"]),
        ({"name": "int4", "error_decay": -1}, ["compress.error_decay=-1", "or null"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["movement", "accumulated"])
def test_a_compression_that_makes_no_sense_is_refused(
    name: str, given: Any, fragments: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        make_exchange({"name": name, "compress": given})
    assert "\n" not in str(error.value)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_an_exchange_without_compression_is_called_what_it_was_in_older_records() -> None:
    assert repr(make_exchange({"name": "movement", "every": 3})) == "Movement(every=3)"
    assert repr(make_exchange("accumulated")) == "Accumulated(n_push=1, n_fetch=1)"
    given = make_exchange({"name": "movement", "compress": {"name": "topk", "density": 0.1}})
    assert repr(given) == (
        "Movement(every=8, compress=TopK(density=0.1, bits=2, error_decay=0.95))"
    )


def test_workers_that_write_to_the_masters_hand_nothing_over_to_be_compressed() -> None:
    wanted = "compress was given; in_place takes .*, compress is one of .*movement"
    with pytest.raises(UserError, match=wanted):
        make_exchange({"name": "in_place", "compress": "int8"})
