"""The portable header: compiled, called, and compared with the reference byte by byte.

It is compiled twice, plainly and with flags that break floating-point code, because it must not matter.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourbits.formats.codes import decode, encode
from fourbits.formats.descriptors import E2M1, E4M3, E8M0
from fourbits.quant.operand import OperandSpec
from fourbits.quant.quantize import quantize
from support.adversarial import FINITE, NON_FINITE

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "src" / "fourbits" / "include"
FLAGS = {"plain": ["-O2"], "fast-math": ["-O3", "-ffast-math", "-ffp-contract=fast"]}
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-pedantic", "-Werror"]
KEY = (1234, 44, 17, 48, 3)
FMAX, INF, NAN = 3.4028234663852886e38, float("inf"), float("nan")

SPECS = {
    "nvfp4": OperandSpec(),
    "nvfp4-tile": OperandSpec(block=(16, 16)),
    "nvfp4-sr": OperandSpec(rounding="sr"),
    "nvfp4-tile-sr32": OperandSpec(block=(16, 16), rounding="sr32"),
    "nvfp4-zeros": OperandSpec(te_compat=False),
    "mxfp4": OperandSpec(format="mxfp4"),
    "mxfp4-tile-sr": OperandSpec(format="mxfp4", block=(32, 32), rounding="sr"),
    "mxfp4-ceil-sr32": OperandSpec(format="mxfp4", scale_rule="ceil", rounding="sr32"),
}
SIZES = (0, 1, 15, 17, 48)


def compiler() -> str:
    """A C++ compiler, which torch.compile needs as well."""
    named = os.environ.get("CXX")
    found = (
        shutil.which(named)
        if named
        else shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    )
    if found is None:
        looked_for = f"CXX={named}" if named else "c++, g++, clang++"
        pytest.fail(f"no C++ compiler found ({looked_for}). Install one: torch.compile needs it as well.")
    return found


@pytest.fixture(scope="module", params=FLAGS)
def codec(request, tmp_path_factory):
    """The compiled header. Compiled and linked apart: linking with -ffast-math changes the whole process."""
    folder = tmp_path_factory.mktemp(request.param)
    calls = [
        compiler(),
        *STRICT,
        *FLAGS[request.param],
        "-fPIC",
        "-I",
        INCLUDE,
        "-c",
        HERE / "codec_calls.cpp",
    ]
    subprocess.run([*calls, "-o", folder / "codec.o"], check=True)
    subprocess.run([compiler(), "-shared", folder / "codec.o", "-o", folder / "codec.so"], check=True)
    return ctypes.CDLL(str(folder / "codec.so"))


def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def over(function, *arrays: np.ndarray, out: type, first: int | None = None) -> np.ndarray:
    """`function` of the header over arrays of equal length."""
    result = np.zeros(len(arrays[0]), dtype=out)
    leading = () if first is None else (first,)
    function(*leading, *map(pointer, arrays), pointer(result), ctypes.c_size_t(len(result)))
    return result


def by_header(codec, x: Tensor, spec: OperandSpec, axis: int, amax: float | None):
    """codes, block_scale, global_scale and values of the stored matrix, as the header computes them."""
    stored, block = (x if axis == 1 else x.t()), spec.block or spec.block_format.block
    assert block is not None
    rows, columns = stored.shape
    padded = -(-columns // 16) * 16
    sizes = np.array([rows, columns, *stored.stride()], dtype=np.uint64)
    choices = [spec.format == "mxfp4", *block, ("rne", "sr", "sr32").index(spec.rounding), spec.te_compat]
    options = np.array([*choices, spec.scale_rule == "ceil"], dtype=np.uint64)
    codes = np.full((rows, padded // 2), 0xAA, dtype=np.uint8)
    scales = np.full((-(-rows // block[0]), -(-padded // block[1])), 0xAA, dtype=np.uint8)
    one, values = np.zeros((), np.uint32), np.zeros((rows, columns), np.uint32)
    given_amax = None if amax is None else np.array(amax, dtype=np.float32)
    inputs = (options, np.array(KEY, dtype=np.uint32), x.numpy(), sizes, given_amax)
    codec.quantize_matrix(*map(pointer, (*inputs, codes, scales, one, values)))
    return codes, scales, one, values


def assert_same_bytes(codec, x: Tensor, spec: OperandSpec, axis: int = 1, amax: float | None = None) -> None:
    """The header's operand is the reference's: codes, scales and values."""
    given_amax = None if amax is None else torch.tensor(amax)
    q = quantize(x, spec, axis, amax=given_amax, sr_key=torch.tensor(KEY))
    codes, scales, one, values = by_header(codec, x, spec, axis, amax)
    np.testing.assert_array_equal(codes, q.codes.numpy())
    np.testing.assert_array_equal(scales, q.block_scale.view(torch.uint8).numpy())
    assert one == q.global_scale.numpy().view(np.uint32)
    expected = q.dequantize(torch.float32)
    expected = (expected if axis == 1 else expected.t()).contiguous().numpy()
    np.testing.assert_array_equal(values.view(np.float32), expected)
    np.testing.assert_array_equal(
        np.signbit(values.view(np.float32)), np.signbit(expected) & ~np.isnan(expected)
    )


def any_patterns(count: int, seed: int) -> np.ndarray:
    """Finite binary32 patterns: any exponent, and significands of few bits, which make ties."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 1 << 32, count, dtype=np.uint32)
    raw &= np.where(generator.random(count) < 0.5, 0xFFFFFFFF, 0xFFFFF000).astype(np.uint32)
    return raw[np.isfinite(raw.view(np.float32))]


def test_products_and_quotients_are_those_of_the_processor(codec):
    a, b = any_patterns(400_000, 1), any_patterns(400_000, 2)
    a, b = a[: min(len(a), len(b))], b[: min(len(a), len(b))]
    with np.errstate(all="ignore"):
        expected = (a.view(np.float32) * b.view(np.float32)).view(np.uint32)
        np.testing.assert_array_equal(over(codec.multiply_all, a, b, out=np.uint32), expected)
        a, b = a & 0x7FFFFFFF, b & 0x7FFFFFFF
        normal = a >= 0x00800000
        expected = (a[normal].view(np.float32) / b[normal].view(np.float32)).view(np.uint32)
        np.testing.assert_array_equal(over(codec.divide_all, a[normal], b[normal], out=np.uint32), expected)


@pytest.mark.parametrize("element", [E2M1, E4M3], ids=lambda e: e.name)
def test_codes_equal_the_reference_at_every_tie_and_its_neighbours(codec, element):
    grid = decode(torch.arange(element.max_code + 1, dtype=torch.uint8), element).numpy()
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [element.max_value * 2, 1e38]])
    points = points.astype(np.float32)
    around = [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(2e38))]
    v = np.concatenate([*around, any_patterns(50_000, 3).view(np.float32)])
    v = np.concatenate([v, -v, np.array([FMAX, -FMAX], np.float32)])
    expected = encode(torch.from_numpy(v), element).numpy()
    grid_bits = element.bits
    np.testing.assert_array_equal(
        over(codec.encode_all, v.view(np.uint32), out=np.uint8, first=grid_bits), expected
    )


def test_every_code_decodes_to_the_reference_value(codec):
    for name, element, count in ((4, E2M1, 16), (8, E4M3, 256), (0, E8M0, 256)):
        codes = np.arange(count, dtype=np.uint8)
        values = over(codec.decode_all, codes, out=np.uint32, first=name).view(np.float32)
        expected = decode(torch.from_numpy(codes), element).numpy()
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(np.signbit(values)[values == 0], np.signbit(expected)[values == 0])


@pytest.mark.parametrize("noise_bits", [8, 24])
def test_stochastic_codes_move_up_where_the_rule_says(codec, noise_bits):
    """The rule in exact integers: v in units of 2^-40 below 8, where every pattern used is a whole number."""
    generator = np.random.default_rng(5)
    units = generator.integers(0, 7 << 24, 20_000, dtype=np.int64) << generator.integers(0, 17, 20_000)
    units = np.minimum(units, 7 << 40)
    v = np.ldexp(units.astype(np.float64), -40).astype(np.float32)
    units = np.rint(np.ldexp(v.astype(np.float64), 40)).astype(np.int64)
    noise = generator.integers(0, 1 << noise_bits, len(v), dtype=np.uint32)
    grid = (np.array([0, 1, 2, 3, 4, 6, 8, 12, 16]) << 39).astype(np.int64)
    low = np.searchsorted(grid[:8], np.minimum(units, grid[7]), side="right") - 1
    above, step = np.minimum(units, grid[7]) - grid[low], grid[low + 1] - grid[low]
    if noise_bits == 8:
        up = noise + (above * 256) // step >= 256
    else:
        up = noise.astype(object) * step.astype(object) < above.astype(object) << 24
    codes = over(codec.encode_stochastic_all, v.view(np.uint32), noise, out=np.uint8, first=noise_bits)
    np.testing.assert_array_equal(codes, low + up.astype(np.int64))


def test_every_code_under_every_scale_byte(codec):
    """Rows whose maxima give each E4M3 scale 1 to 0x7E, filled with every E2M1 value under that scale."""
    grid = decode(torch.arange(16, dtype=torch.uint8), E2M1)
    scales = decode(torch.arange(1, 0x7F, dtype=torch.uint8), E4M3)
    x = grid * scales[:, None]
    q = quantize(x, SPECS["nvfp4"])
    assert sorted(q.block_scale.view(torch.uint8).flatten().tolist()) == list(range(1, 0x7F))
    assert all(sorted(row.tolist()) == sorted(q.codes[0].tolist()) for row in q.codes)
    assert_same_bytes(codec, x, SPECS["nvfp4"])
    exponents = torch.exp2(torch.arange(-126.0, 125.0))[:, None]
    assert_same_bytes(codec, torch.cat([grid, grid], dim=0) * exponents, SPECS["mxfp4"])


@pytest.mark.parametrize("kind", [*FINITE, *NON_FINITE])
@pytest.mark.parametrize("name", SPECS)
def test_bytes_equal_the_reference(codec, name, kind):
    make = {**FINITE, **NON_FINITE}[kind]
    for axis, shape in itertools.product((0, 1), [(33, 50), (16, 16), (1, 64)]):
        assert_same_bytes(codec, make(shape, axis), SPECS[name], axis)


@pytest.mark.parametrize("name", SPECS)
def test_any_shape_equals_the_reference(codec, name):
    for number, shape in enumerate(itertools.product(SIZES, SIZES)):
        assert_same_bytes(codec, FINITE["spread"](shape, number), SPECS[name], number % 2)


@pytest.mark.parametrize("amax", [0.0, -0.0, 1e-45, 7e-36, 7.9e-36, 1e-3, -2.0, 1e4, FMAX, INF, -INF, NAN])
@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith("nv")])
def test_a_given_amax_equals_the_reference(codec, name, amax):
    for kind in ("normal", "huge", "zeros", "subnormal"):
        assert_same_bytes(codec, FINITE[kind]((18, 33), 2), SPECS[name], amax=amax)
    for shape in ((0, 16), (3, 0)):
        assert_same_bytes(codec, torch.zeros(shape), SPECS[name], amax=amax)
    for kind in NON_FINITE:
        assert_same_bytes(codec, NON_FINITE[kind]((18, 33), 2), SPECS[name], axis=0, amax=amax)


@given(
    rows=st.integers(0, 40),
    columns=st.integers(0, 70),
    kind=st.sampled_from([*FINITE, *NON_FINITE]),
    name=st.sampled_from(list(SPECS)),
    axis=st.integers(0, 1),
    seed=st.integers(0, 999),
)
def test_random_shapes_and_inputs_equal_the_reference(codec, rows, columns, kind, name, axis, seed):
    x = {**FINITE, **NON_FINITE}[kind]((rows, columns), seed)
    assert_same_bytes(codec, x, SPECS[name], axis)


def test_the_example_of_the_page_compiles_and_prints_what_it_says(tmp_path):
    text = (HERE.parents[1] / "docs" / "cpp.md").read_text(encoding="utf-8")
    example = text.split("```cpp\n")[1].split("```")[0]
    (tmp_path / "example.cpp").write_text(example, encoding="utf-8")
    command = [compiler(), "-std=c++17", "-I", INCLUDE, tmp_path / "example.cpp", "-o", tmp_path / "example"]
    subprocess.run(command, check=True)
    printed = subprocess.run([tmp_path / "example"], check=True, capture_output=True, text=True).stdout
    assert printed == example.rsplit("// prints: ", 1)[1].splitlines()[0] + "\n"
