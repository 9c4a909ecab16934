"""Quantisers: as many bytes as they say, errors within their step, bad values refused by name."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.compression.quantisers import BlockInteger, QuantisationError, quantiser

NAMES = ["fp32", "fp16", "bf16", "int8", "int4"]
SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@settings(deadline=None)
@given(
    name=st.sampled_from(NAMES),
    shape=SHAPES,
    block=st.integers(2, 33),
    magnitude=st.floats(-6, 4),
    seed=st.integers(0, 2**31),
)
def test_payload_length_and_error_are_as_stated(name, shape, block, magnitude, seed):
    scheme = quantiser(name, block)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10**magnitude
    payload = scheme.compress(tensor)
    assert payload.dtype == torch.uint8 and payload.shape == (scheme.nbytes(shape),)
    # a payload is cut out of a larger one at any offset
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), payload))[1:]
    back = scheme.decompress(shifted, shape)
    assert back.shape == tensor.shape and back.dtype == torch.float32
    error = (back - tensor).abs()
    if name == "fp32":
        assert torch.equal(back, tensor)
    elif isinstance(scheme, BlockInteger):
        top = scheme._in_blocks(tensor.flatten()).abs().amax(dim=1, keepdim=True)
        largest = tensor.abs().max() if tensor.numel() else torch.tensor(0.0)
        # half a step, plus what rounding the block's scale to fp16 may clip
        allowed = top * (0.5 / scheme.top + 2**-10) + largest * 2**-24
        assert (scheme._in_blocks(error.flatten()) <= allowed).all()
    else:
        bits = {"fp16": 11, "bf16": 8}[name]
        assert (error <= tensor.abs() * 2**-bits + 2**-25).all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_empty_tensors_come_back_exactly(name):
    for shape in ((0,), (0, 5), (1,), (7,), (3, 43)):
        assert torch.equal(
            quantiser(name).decompress(quantiser(name).compress(torch.zeros(shape)), shape),
            torch.zeros(shape),
        )


def test_int4_is_two_values_a_byte_low_half_first():
    scheme = quantiser("int4", block=8)
    values = torch.tensor([7.0, -7.0, 1.0, 0.0, -1.0])
    payload = scheme.compress(values)
    assert scheme.nbytes((5,)) == 4 + 2 + 3
    assert payload[6:].tolist() == [0x97, 0x01, 0x0F]
    assert torch.equal(scheme.decompress(payload, (5,)), values)


def test_sizes_by_hand():
    assert quantiser("int8", 128).nbytes((1000,)) == 4 + 2 * 8 + 1000
    assert quantiser("int4", 128).nbytes((1001,)) == 4 + 2 * 8 + 501
    assert quantiser("bf16").nbytes((3, 5)) == 30
    assert all(quantiser(name).nbytes((0,)) == 0 for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_cannot_be_sent_is_refused_by_name(name, bad):
    tensor = torch.ones(10)
    tensor[3] = bad
    with pytest.raises(QuantisationError, match=r"layers\.0\.weight holds"):
        quantiser(name).compress(tensor, "layers.0.weight")


def test_fp16_refuses_what_it_would_turn_into_infinity():
    with pytest.raises(QuantisationError, match="beyond the range of fp16"):
        quantiser("fp16").compress(torch.tensor([1e5]), "w")
    assert torch.isfinite(quantiser("int4").compress(torch.tensor([1e30]), "w").float()).all()


def test_small_tensors_keep_their_precision():
    """Scales are relative to the tensor's largest value, so a tiny tensor is as precise as a large one."""
    values = torch.linspace(-1, 1, 100) * 1e-20
    back = quantiser("int8", 32).decompress(quantiser("int8", 32).compress(values), (100,))
    assert float((back - values).norm() / values.norm()) < 0.01


def test_a_payload_of_another_length_is_refused():
    with pytest.raises(ValueError, match="allowed exactly 4"):
        quantiser("fp32").decompress(torch.zeros(5, dtype=torch.uint8), (1,))


def test_unknown_names_are_answered_with_the_valid_ones():
    with pytest.raises(ValueError, match="fp32, bf16, fp16, int8, int4"):
        quantiser("int3")
