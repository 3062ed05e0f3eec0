"""Cases in which grouped kernels must give the bytes of each group by itself, interpreted and on a GPU.

Run as a program it checks them in Triton's interpreter: TRITON_INTERPRET=1 python -m support.grouped_cases
"""

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from fourbits.gemm.grouped import column_sums, rows_gemm, sums_gemm
from fourbits.gemm.kernels import gemms
from fourbits.gemm.kernels.launch_bf16 import bf16_gemm
from fourbits.linear.plan import linear_plan
from fourbits.linear.sr_counter import KEY_FIELDS, after_tokens, new_counter
from fourbits.linear.stacked import fused, loop
from fourbits.linear.stacked.loop import GroupedCall
from fourbits.quant import quantize as dispatch
from fourbits.quant.grouped import equal_groups, grouped_quantizer, height_of, tile_map
from fourbits.quant.grouped_layout import GroupedOperand, GroupTiles, most_tiles
from fourbits.quant.kernels import support
from fourbits.quant.operand import OperandSpec
from fourbits.quant.reference import grouped as reference
from fourbits.quant.request import OPERAND_ROLES, OperandRequest, signature_of
from fourbits.recipe.presets import get_recipe
from support.assertions import as_bytes
from support.triton_interpreter import failures

#: rows of each group: empty ones first, last and beside each other, odd ones, more than a tile of 128
COUNTS = {
    "odd": (17, 0, 0, 130, 5, 0),
    "one has all": (0, 0, 97),
    "none has any": (0, 0),
    "one group": (40,),
    "one row each": (1, 1, 1, 1, 1),
}
_LAYER = 11


@dataclass(frozen=True)
class Quantized:
    """A tensor of groups and its operands. roles: of one tensor, as a recipe has them."""

    recipe: str
    roles: tuple[str, ...]
    counts: str = "odd"
    columns: int = 48
    dtype: torch.dtype = torch.bfloat16
    #: rows past the last group, which belong to none
    rest: int = 0
    shifted: bool = False
    values: str = "normal"


@dataclass(frozen=True)
class Product:
    """A product of experts, forward and backward."""

    recipe: str
    counts: str = "odd"
    transposed: bool = False
    bias: bool = False
    sizes: tuple[int, int] = (48, 32)
    dtype: torch.dtype = torch.bfloat16


QUANTIZED = [
    *(
        Quantized(recipe, roles)
        for recipe in ("nvfp4", "nvfp4-46", "mxfp4", "nvfp4-naive")
        for roles in (("fprop.lhs", "wgrad.rhs"), ("dgrad.lhs", "wgrad.lhs"))
    ),
    *(Quantized("nvfp4", ("dgrad.lhs", "wgrad.lhs"), counts) for counts in COUNTS),
    Quantized("nvfp4", ("dgrad.lhs", "wgrad.lhs"), columns=50, rest=7, shifted=True),
    Quantized("nvfp4", ("fprop.lhs", "wgrad.rhs"), dtype=torch.float32, columns=130),
    Quantized("nvfp4", ("fprop.lhs",), dtype=torch.float16),
    Quantized("nvfp4", ("wgrad.lhs",), values="nan"),
    Quantized("mxfp8", ("fprop.lhs", "wgrad.rhs"), shifted=True),
]
PRODUCTS = [
    Product("nvfp4"),
    Product("nvfp4", transposed=True, bias=True),
    Product("nvfp4", "one has all", sizes=(50, 33), bias=True),
    Product("nvfp4", transposed=True, sizes=(50, 33)),
    Product("nvfp4-naive", "one has all", sizes=(50, 33)),
    Product("nvfp4-naive", transposed=True),
    Product("nvfp4-46", "one row each", dtype=torch.float32),
    Product("mxfp4", "none has any"),
]


def offsets_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def quantized_differences(case: Quantized, device: torch.device | str = "cpu") -> list[str]:
    """What differs between kernels and reference: the map, and operands where they are defined."""
    counts, device = COUNTS[case.counts], torch.device(device)
    offsets, rows = offsets_of(counts), sum(counts) + case.rest
    x, keys, requests = tensor_of(case, rows), keys_of(case), requests_of(case)
    height = height_of([request.spec for request in requests])
    size = most_tiles(rows, len(counts), height)
    expected_tiles = reference.group_tiles(offsets, height, size)
    tiles = tile_map(rows, len(counts), height, device)(offsets.to(device))
    pairs = zip(tiles[:2], expected_tiles[:2], strict=True)
    found = [] if all(torch.equal(one.cpu(), other) for one, other in pairs) else ["map"]
    on_device, stride = x.to(device), 9 if case.shifted else 0
    plan = grouped_quantizer(signature_of(on_device), len(counts), (size, height), requests, False, stride)
    streams = tuple(_LAYER * 8 + OPERAND_ROLES.index(role) for role in case.roles)
    made = plan(on_device, tiles, keys.to(device), streams)

    def key(request: OperandRequest, group: int) -> Tensor:
        stream = streams[requests.index(request)] + 8 * group
        counter = keys[min(group, len(keys) - 1)]
        return counter[list(request.key_fields)] + torch.tensor([0, stream, 0, 0, 0])

    true = reference.grouped_operands(x, offsets, expected_tiles, requests, key, padded=False)
    for operand, expected in zip(made, true, strict=True):
        found += _operand_differences(operand, expected, expected_tiles, counts, case.columns)
    return found


def tensor_of(case: Quantized, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((max(rows, 1), case.columns), generator=generator)[:rows].to(case.dtype)
    if case.values == "nan":
        x[3, 5] = float("nan")
    return x


def keys_of(case: Quantized) -> Tensor:
    """Counters of a call that is not its layer's first, where they are shifted."""
    keys = new_counter(1234, 17, 48)[None]
    return after_tokens(keys, torch.arange(len(COUNTS[case.counts])) * 16) if case.shifted else keys


def requests_of(case: Quantized) -> tuple[OperandRequest, ...]:
    table = get_recipe(case.recipe).table
    return tuple(
        OperandRequest(table.operand(role), int(role[:5] != "wgrad"), False, "own", KEY_FIELDS[role])
        for role in case.roles
    )


def _operand_differences(
    operand: GroupedOperand,
    expected: GroupedOperand,
    tiles: GroupTiles,
    counts: tuple[int, ...],
    columns: int,
) -> list[str]:
    """Of each group: its scale, its values as bytes, and along axis 0 zeros to the end of its last tile."""
    found: list[str] = []
    first, unit = 0, max(16, expected.spec.rht)
    for group, rows in enumerate(counts):
        start, last = first, first + rows
        if expected.axis == 0:
            start = int(tiles.starts[group]) * tiles.height
            last = start + -(-rows // unit) * unit
        first += rows
        if rows:
            width = columns if expected.axis == 0 else None
            pair = [op.values[start:last, :width].cpu() for op in (operand, expected)]
            found += _unequal(f"axis {expected.axis} of group {group}", *pair)
            scales = [op.scale[group].cpu() for op in (operand, expected)]
            found += _unequal(f"scale {expected.axis} of group {group}", *scales)
            end = int(tiles.starts[group + 1]) * tiles.height
            rest = operand.values[last:end, :width] if expected.axis == 0 else None
            if rest is not None and rest.any() and not pair[1].isnan().any():
                found.append(f"group {group} is not completed with zeros")
    return found


def _unequal(what: str, result: Tensor, true: Tensor) -> list[str]:
    """Bytes compared, of which NaN has several."""
    poisoned = true.isnan()
    if not torch.equal(result.isnan(), poisoned):
        return [f"{what}: NaN elsewhere"]
    result, true = torch.where(poisoned, 0.0, result), torch.where(poisoned, 0.0, true)
    count = int((as_bytes(result) != as_bytes(true)).sum())
    return [f"{what}: {count} bytes differ"] if count else []


def product_differences(case: Product) -> list[str]:
    """What differs between grouped kernels and a loop of linear layers by the reference."""
    call, dy = inputs_of(case)
    needs = (True, True, case.bias)
    y, saved = fused.forward(call, needs[:2])
    fakes = fused.fake_saved(call, needs[:2])
    made = [y, *fused.backward(call._replace(x=None), dy, saved, needs)]
    found = [
        f"saved {i}"
        for i, (real, fake) in enumerate(zip(saved, fakes, strict=False))
        if (real.shape, real.dtype, real.stride()) != (fake.shape, fake.dtype, fake.stride())
    ]
    with by_the_reference():
        true = [loop.forward(call), *loop.backward(call, dy, needs)]
    for name, result, expected in zip(("Y", "dX", "dW", "dbias"), made, true, strict=True):
        if expected is not None:
            assert result is not None
            found += _close(name, result, expected)
    return found


def _close(name: str, result: Tensor, expected: Tensor) -> list[str]:
    """Operands are equal, so only the order of FP32 sums may differ, and a rounding of Y and dX."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return [f"{name}: {result.dtype} {list(result.shape)}"]
    epsilon = torch.finfo(expected.dtype).eps
    bound = 2 * epsilon * expected.abs() + 2.0**-20 * (expected.abs().max() if expected.numel() else 0.0)
    wrong = ((result.float() - expected.float()).abs() > bound.float()).sum()
    return [f"{name}: {int(wrong)} of {expected.numel()} differ"] if wrong else []


def inputs_of(case: Product, device: torch.device | str = "cpu") -> tuple[GroupedCall, Tensor]:
    """The call of a case, and dY."""
    counts, (K, N) = COUNTS[case.counts], case.sizes
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, dy = normal(sum(counts), K).to(case.dtype), normal(sum(counts), N).to(case.dtype)
    weight = normal(len(counts), *((K, N) if case.transposed else (N, K)))
    bias = normal(len(counts), N) if case.bias else None
    table = get_recipe(case.recipe).table.to_text()
    tensors = [t if t is None else t.to(device) for t in (x, weight, bias, offsets_of(counts))]
    counters = new_counter(7, 3, 32)[None].to(device)
    return GroupedCall(*tensors, counters, _LAYER, table, case.transposed), dy.to(device)  # pyright: ignore


class by_the_reference:  # noqa: N801  # reads as a function does
    """No kernels and no plans that have them."""

    def __enter__(self) -> None:
        self._patches = [
            patch.object(module, "unsupported_device", lambda device: "off") for module in (support, gemms)
        ]
        for each in self._patches:
            each.start()
        forget()

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()
        forget()


def forget() -> None:
    """Plans are made again."""
    for cached in (dispatch.quantizer, linear_plan, bf16_gemm):
        cached.cache_clear()


class GroupedGemms:
    """Random BF16 operands for the GEMMs of groups, laid out as by the quantizer; NaN where that may leave
    anything: in columns beyond a tensor's.
    """

    HEIGHT = 64

    def __init__(self, counts: tuple[int, ...], sizes: tuple[int, int], device: torch.device | str) -> None:
        (K, N), groups = sizes, len(counts)
        self.sizes, self.groups, self.device = sizes, groups, torch.device(device)
        self.offsets, self.rows = offsets_of(counts), sum(counts)
        self.slices = [slice(*pair) for pair in itertools.pairwise(self.offsets.tolist())]
        self.generator = torch.Generator().manual_seed(2)
        most = most_tiles(self.rows, groups, self.HEIGHT)
        self.tiles = reference.group_tiles(self.offsets, self.HEIGHT, most)
        self.x, self.dy = self.bf16(self.rows, K), self.bf16(self.rows, N)
        self.w, self.bias = self.bf16(groups, N, K), self.bf16(groups, N).float()
        padded = torch.nn.functional.pad(self.w, (0, 0, 0, -N % self.HEIGHT)).flatten(0, 1)
        self.operands = {
            "x": self.operand(self.x, 1),
            "dy": self.operand(self.dy, 1),
            "w": self.operand(padded, 1),
            "x down": self.operand(self.in_tiles(self.x), 0),
            "dy down": self.operand(self.in_tiles(self.dy), 0),
        }

    def bf16(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(torch.bfloat16)

    def operand(self, values: Tensor, axis: int) -> GroupedOperand:
        scale = torch.rand(self.groups, generator=self.generator) + 0.5
        values = torch.nn.functional.pad(values, (0, -values.shape[1] % 16), value=float("nan"))
        return GroupedOperand(values.to(self.device), scale.to(self.device), axis, OperandSpec())

    def in_tiles(self, x: Tensor) -> Tensor:
        """Rows of groups, each completed to whole tiles with zeros."""
        laid = x.new_zeros((len(self.tiles.entries) * self.HEIGHT, x.shape[1]))
        for start, rows in zip(self.tiles.starts.tolist(), self.slices, strict=False):
            laid[start * self.HEIGHT :][: rows.stop - rows.start] = x[rows]
        return laid

    def results(self) -> dict[str, Tensor]:
        """Y, dX, dW and dbias by the kernels, on the CPU in FP64."""
        (K, N), groups, device, given = self.sizes, self.groups, self.device, self.operands
        transposed, offsets = given["w"]._replace(axis=0), self.offsets.to(device)
        forward = rows_gemm(given["x"], given["w"], groups, (N, K), torch.float32, torch.float32)
        back = rows_gemm(given["dy"], transposed, groups, (K, N), torch.float32, None)
        maps = [tile_map(self.rows, groups, gemm.height, device)(offsets) for gemm in (forward, back)]
        down = given["dy down"], given["x down"]
        tiles = GroupTiles(self.tiles.entries.to(device), self.tiles.starts.to(device), self.HEIGHT)
        sums = sums_gemm(*down, groups, (N, K), self.HEIGHT)
        found = {
            "fprop": forward(given["x"], given["w"], maps[0], self.bias.to(device)),
            "dgrad": back(given["dy"], transposed, maps[1], None),
            "wgrad": sums(*down, (down[0].scale, down[1].scale), tiles),
            "bias": column_sums(N, groups, device)(self.dy.to(device), offsets),
        }
        return {name: result.cpu().double() for name, result in found.items()}

    def excess(self) -> dict[str, float]:
        """Errors over what FP32 sums allow. Allowed for a sum of L products, in any order: (L + 4) rounding
        errors of the sum of their magnitudes.
        """
        found = self.results()
        largest: dict[str, float] = dict.fromkeys(found, 0.0)
        scales = {name: operand.scale.cpu().double() for name, operand in self.operands.items()}
        for group, rows in enumerate(self.slices):
            x, dy, w = self.x[rows].double(), self.dy[rows].double(), self.w[group].double()
            s = {name: scale[group] for name, scale in scales.items()}
            bias, ones = self.bias[group].double(), torch.ones(1, len(x)).double()
            for name, result, left, right, scale, added in (
                ("fprop", found["fprop"][rows], x, w.t(), s["x"] * s["w"], bias),
                ("dgrad", found["dgrad"][rows], dy, w, s["dy"] * s["w"], 0 * s["w"]),
                ("wgrad", found["wgrad"][group], dy.t(), x, s["dy down"] * s["x down"], 0 * s["w"]),
                ("bias", found["bias"][group][None], ones, dy, ones.new_ones(()), 0 * s["w"]),
            ):
                exact = left @ right * scale + added
                magnitude = left.abs() @ right.abs() * scale + added.abs()
                allowed = (left.shape[1] + 4) * 2.0**-23 * magnitude + 1e-30
                share = ((result - exact).abs() / allowed).nan_to_num(nan=float("inf"))
                largest[name] = max(largest[name], share.max().item() if share.numel() else 0.0)
        return largest


def gemm_excess(
    counts: tuple[int, ...], sizes: tuple[int, int], device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Errors of the grouped GEMMs over what FP32 sums allow; at most 1 is right. sizes: (K, N)."""
    return GroupedGemms(counts, sizes, device).excess()


def weights_lie_in_equal_groups() -> list[str]:
    """The map of weights is that of groups of as many rows, without room for more."""
    tiles = equal_groups(3, 70, 64, torch.device("cpu"))
    expected = [
        [0, 0, 64, 0],
        [0, 64, 6, 64],
        [1, 70, 64, 0],
        [1, 134, 6, 64],
        [2, 140, 64, 0],
        [2, 204, 6, 64],
    ]
    return [] if tiles.entries.tolist() == expected and tiles.starts.tolist() == [0, 2, 4, 6] else ["map"]


def checks() -> Iterator[tuple[object, object]]:
    """Everything, as (name, check)."""
    yield "weights", weights_lie_in_equal_groups
    for case in QUANTIZED:
        yield case, lambda case=case: quantized_differences(case)
    for product in PRODUCTS:
        yield product, lambda case=product: product_differences(case)
    for counts in filter(sum, COUNTS.values()):
        found = lambda counts=counts: gemm_excess(counts, (40, 72))  # noqa: E731
        yield f"GEMMs of {counts}", lambda found=found: [f"{k} {v}" for k, v in found().items() if not v <= 1]


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    sys.exit(min(100, failures(checks())))  # pyright: ignore[reportArgumentType]
