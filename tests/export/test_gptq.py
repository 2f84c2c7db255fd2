"""The tensors of version 1 and 2 against values written down by hand."""

import pytest
import torch

from gptqkit.errors import CheckpointError, ConversionError
from gptqkit.export.bits import pack
from gptqkit.export.gptq import decode_zeros, encode_zeros, from_tensors, to_tensors
from gptqkit.quantizer.config import Format
from gptqkit.quantizer.quantized import QuantizedWeight


def make_weight(
    bits: int = 4, rows: int = 64, columns: int = 96, group_size: int = 32, *, sym: bool = False, low: int = 1
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits)
    groups = -(-columns // group_size)
    zero = torch.randint(low, 1 << bits, (rows, groups), generator=generator, dtype=torch.int16)
    return QuantizedWeight(
        codes=torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8),
        scale=(torch.rand(rows, groups, generator=generator) / 7 + 1e-4).half(),
        zero=zero.fill_(1 << (bits - 1)) if sym else zero,
        group_index=(torch.arange(columns) // group_size).to(torch.int32),
        bits=bits,
        group_size=group_size,
        sym=sym,
    )


def assert_same(left: QuantizedWeight, right: QuantizedWeight) -> None:
    for name in ("codes", "scale", "zero", "group_index"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
        assert getattr(left, name).dtype == getattr(right, name).dtype
    assert (left.bits, left.group_size, left.sym) == (right.bits, right.group_size, right.sym)


def read(tensors: dict[str, torch.Tensor], bits: int = 4, format: Format = "gptq_v2") -> QuantizedWeight:  # noqa: A002
    return from_tensors("layer", tensors, bits=bits, group_size=32, sym=False, format=format)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("group_size", [32, 40, 96])
def test_round_trip_is_exact(bits: int, sym: bool, format: Format, group_size: int) -> None:  # noqa: A002
    weight = make_weight(bits, group_size=group_size, sym=sym)
    tensors = to_tensors(weight, format)
    groups = -(-96 // group_size)
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()} == {
        "qweight": (torch.int32, (96 * bits // 32, 64)),
        "qzeros": (torch.int32, (groups, 64 * bits // 32)),
        "scales": (torch.float16, (groups, 64)),
        "g_idx": (torch.int32, (96,)),
    }
    back = from_tensors("layer", tensors, bits=bits, group_size=group_size, sym=sym, format=format)
    assert_same(back, weight)
    assert torch.equal(back.dequantize(), weight.dequantize())


def test_qweight_by_hand() -> None:
    """Inputs 0 ... 7 of output n share word n of row 0."""
    weight = make_weight(4, rows=8, columns=8, group_size=8)
    weight.codes.zero_()
    weight.codes[3, 0] = 0x5
    weight.codes[3, 7] = 0xC
    qweight = to_tensors(weight, "gptq_v2")["qweight"]
    assert qweight.shape == (1, 8)
    assert [int(word) & 0xFFFFFFFF for word in qweight[0]] == [0, 0, 0, 0xC0000005, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("format", "bits", "zeros", "word"),
    [
        ("gptq_v2", 4, [8, 8, 8, 8, 8, 8, 8, 8], 0x88888888),
        ("gptq", 4, [8, 8, 8, 8, 8, 8, 8, 8], 0x77777777),
        ("gptq_v2", 4, [0, 1, 2, 3, 4, 5, 6, 15], 0xF6543210),
        ("gptq", 4, [1, 2, 3, 4, 5, 6, 7, 16], 0xF6543210),
        ("gptq", 2, [2] * 15 + [1], 0x15555555),
        ("gptq", 8, [128, 128, 128, 256], 0xFF7F7F7F),
    ],
)
def test_zeros_by_hand(format: Format, bits: int, zeros: list[int], word: int) -> None:  # noqa: A002
    zero = torch.tensor([zeros], dtype=torch.int16)
    words = encode_zeros(zero, bits, format)
    assert int(words[0, 0]) & 0xFFFFFFFF == word
    assert decode_zeros(words, bits, format).tolist() == [zeros]


def test_three_bit_zeros_by_hand() -> None:
    """Symmetric 3-bit zeros are 4: 100 repeated in version 2, 011 repeated in version 1."""
    zero = torch.full((1, 32), 4, dtype=torch.int16)
    assert [int(w) & 0xFFFFFFFF for w in encode_zeros(zero, 3, "gptq_v2")[0]] == [0x24924924, 0x49249249, 0x92492492]
    assert [int(w) & 0xFFFFFFFF for w in encode_zeros(zero, 3, "gptq")[0]] == [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]


def test_stored_mask_is_zero_two_to_the_bits_in_version_1() -> None:
    tensors = to_tensors(make_weight(), "gptq")
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], -1)
    weight = read(tensors, format="gptq")
    assert weight.zero.dtype == torch.int16
    assert bool((weight.zero == 16).all())
    assert torch.equal(to_tensors(weight, "gptq")["qzeros"], tensors["qzeros"])


def test_zeros_that_the_format_cannot_hold_are_counted() -> None:
    weight = make_weight()
    weight.zero[:2, 0] = 0
    weight.zero[5, 1] = 0
    with pytest.raises(ConversionError, match=r"3 of 192 zeros lie outside 1 \.\.\. 16, which is what gptq holds"):
        to_tensors(weight, "gptq")
    to_tensors(weight, "gptq_v2")
    weight.zero[9, 2] = 16
    with pytest.raises(ConversionError, match=r"1 of 192 zeros lie outside 0 \.\.\. 15, which is what gptq_v2 holds"):
        to_tensors(weight, "gptq_v2")


def test_missing_group_index_is_made() -> None:
    weight = make_weight()
    tensors = to_tensors(weight, "gptq_v2")
    del tensors["g_idx"]
    assert_same(read(tensors), weight)


def test_act_order_index_is_kept() -> None:
    weight = make_weight()
    weight.group_index.copy_(weight.group_index[torch.randperm(96, generator=torch.Generator().manual_seed(0))])
    assert not read(to_tensors(weight, "gptq_v2")).trivial_group_index
    assert_same(read(to_tensors(weight, "gptq_v2")), weight)


def test_bfloat16_scales_are_taken_only_where_exact() -> None:
    tensors = to_tensors(make_weight(), "gptq_v2")
    tensors["scales"] = tensors["scales"].bfloat16()
    assert torch.equal(read(tensors).scale.t().bfloat16(), tensors["scales"])
    tensors["scales"][0, 0] = 1e-9
    with pytest.raises(CheckpointError, match=r"layer\.scales holds bfloat16 values"):
        read(tensors)


@pytest.mark.parametrize("key", ["qweight", "qzeros", "scales"])
def test_missing_tensor(key: str) -> None:
    tensors = to_tensors(make_weight(), "gptq_v2")
    del tensors[key]
    with pytest.raises(CheckpointError, match=rf"layer\.{key} is missing"):
        read(tensors)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("qweight", lambda t: t.long()),
        ("qzeros", lambda t: t.to(torch.int16)),
        ("scales", lambda t: t.float()),
        ("scales", lambda t: t[:2]),
        ("scales", lambda t: t.flatten()),
        ("qzeros", lambda t: t[:, :4]),
        ("qzeros", lambda t: t[:2]),
        ("g_idx", lambda t: t.long()),
        ("g_idx", lambda t: t[:64]),
        ("g_idx", lambda t: t + 1),
        ("g_idx", lambda t: t - 1),
        ("scales", lambda t: t.clone().fill_(float("nan"))),
        ("scales", lambda t: t.clone().fill_(float("inf"))),
    ],
)
def test_wrong_tensor_is_named(key: str, change: object) -> None:
    tensors = to_tensors(make_weight(), "gptq_v2")
    tensors[key] = change(tensors[key])  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=rf"layer\.{key} "):
        read(tensors)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_bits_that_contradict_the_tensors(bits: int) -> None:
    with pytest.raises(CheckpointError, match=r"layer\.\w+ .*config"):
        read(to_tensors(make_weight(4), "gptq_v2"), bits=bits)


def test_swapped_three_bit_zeros_of_old_gptqmodel_are_recognised() -> None:
    """GPTQModel before 7.0 subtracted 0x24924924, 0x92492492, 0x49249249 from the words of symmetric zeros."""
    tensors = to_tensors(make_weight(3, sym=True), "gptq_v2")
    swapped = torch.tensor([0x24924924, 0x92492492 - (1 << 32), 0x49249249], dtype=torch.int32).repeat(2)
    tensors["qzeros"] = tensors["qzeros"] - swapped
    with pytest.raises(CheckpointError, match=r"layer\.qzeros .*GPTQModel before 7\.0"):
        from_tensors("layer", tensors, bits=3, group_size=32, sym=True, format="gptq")


def test_declared_symmetry_yields_to_the_zeros() -> None:
    weight = make_weight(4)
    assert not from_tensors("l", to_tensors(weight, "gptq"), bits=4, group_size=32, sym=True, format="gptq").sym


def test_codes_come_back_transposed_from_a_strided_weight() -> None:
    weight = make_weight()
    assert torch.equal(to_tensors(weight, "gptq")["qweight"].t(), pack(weight.codes, 4))
