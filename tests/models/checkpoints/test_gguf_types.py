"""Every type of tensor that GGUF files hold: its numbers, and its rows one by one."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from models.checkpoints import GgufFile

NUM_ROWS, WIDTH = 5, 512


def write(path, data, kind):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def halves(*values):
    return np.array(values, np.float16).view(np.uint8)


def low_bits(rng, size):
    return rng.integers(0, 256, size, dtype=np.uint8)


def q4_k_block(rng):
    """256 weights: d, dmin, 8 scales and minima of 6 bits, nibbles; the weights by the formula."""
    scales, minima = rng.integers(0, 64, 8), rng.integers(0, 64, 8)
    packed = np.zeros(12, np.uint8)
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = minima[j] | (minima[j + 4] >> 4) << 6
        packed[j + 8] = (scales[j + 4] & 15) | (minima[j + 4] & 15) << 4
    nibbles = low_bits(rng, 128)
    values = []
    for pair in range(4):
        part = nibbles[32 * pair : 32 * pair + 32].astype(np.float32)
        for j, q in ((2 * pair, part % 16), (2 * pair + 1, part // 16)):
            values.append(np.float32(0.5) * scales[j] * q - np.float32(0.25) * minima[j])
    return np.concatenate([halves(0.5, 0.25), packed, nibbles]), np.concatenate(values)


def q6_k_block(rng):
    """256 weights: low nibbles, high pairs of bits, 16 scales of 8 bits, d; by the formula."""
    low, high = low_bits(rng, 128), low_bits(rng, 64)
    scales = rng.integers(-128, 128, 16).astype(np.int8)
    values = np.zeros(256, np.float32)
    for i in range(256):
        half, within = divmod(i, 128)
        group, j = divmod(within, 32)
        nibble = low[64 * half + 32 * (group % 2) + j]
        nibble = nibble >> 4 if group >= 2 else nibble & 15
        pair = high[32 * half + j] >> (2 * group) & 3
        values[i] = np.float32(0.125) * scales[i // 16] * (int(nibble | pair << 4) - 32)
    return np.concatenate([low, high, scales.view(np.uint8), halves(0.125)]), values


def by_hand(block):
    rng = np.random.default_rng(0)
    pairs = [[block(rng) for _ in range(WIDTH // 256)] for _ in range(NUM_ROWS)]
    data = np.stack([np.concatenate([one[0] for one in row]) for row in pairs])
    return data, np.stack([np.concatenate([one[1] for one in row]) for row in pairs])


def quantised(kind):
    values = np.random.default_rng(0).standard_normal((NUM_ROWS, WIDTH)).astype(np.float32)
    data = gguf.quantize(values, kind)
    return data, gguf.dequantize(data, kind), values


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        (Kind.F32, 0.0),
        (Kind.F16, 2e-3),
        (Kind.BF16, 2e-2),
        (Kind.Q8_0, 2e-2),
        (Kind.Q4_0, 0.35),
        (Kind.Q4_1, 0.2),
        (Kind.Q5_0, 0.2),
        (Kind.Q5_1, 0.1),
    ],
)
def test_types_that_the_library_quantises(tmp_path, kind, tolerance):
    data, expected, values = quantised(kind)
    file = write(tmp_path / "x.gguf", data, kind)
    found = file.tensor("w", (NUM_ROWS, WIDTH))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, values, atol=tolerance)
    np.testing.assert_array_equal(file.tensor("w", (NUM_ROWS, WIDTH), slice(1, 4)), expected[1:4])


@pytest.mark.parametrize(("kind", "block"), [(Kind.Q4_K, q4_k_block), (Kind.Q6_K, q6_k_block)])
def test_types_whose_blocks_are_made_by_hand(tmp_path, kind, block):
    data, expected = by_hand(block)
    file = write(tmp_path / "x.gguf", data, kind)
    assert np.ptp(expected) > 10
    np.testing.assert_allclose(file.tensor("w", (NUM_ROWS, WIDTH)), expected, rtol=1e-6, atol=1e-5)
    rows = file.tensor("w", (NUM_ROWS, WIDTH), slice(2, 3))
    np.testing.assert_allclose(rows, expected[2:3], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", [Kind.Q8_K, Kind.I16])
def test_types_that_are_not_served_are_named(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    dtype, width = (np.uint8, size) if block > 1 else (np.int16, 256)
    file = write(tmp_path / "x.gguf", np.zeros((2, width), dtype), kind)
    with pytest.raises(ValueError, match=rf"x\.gguf: tensor 'w': .* found {kind.name}"):
        file.tensor("w", (2, 256))
