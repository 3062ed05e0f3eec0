"""Which combinations of a spec are refused: fourbits answers as the oracle does (section 3.3)."""

import itertools
from typing import Any

import pytest

from fourbits.quant.operand import OperandSpec
from oracle.spec import FORMATS, Spec, why_not
from support.agreement import fourbits_spec

RULES = ["max", "ceil", "4over6-mse", "4over6-max", "search-mae"]


def is_refused(spec: Spec) -> bool:
    try:
        fourbits_spec(spec)
    except ValueError:
        return True
    return False


def assert_same_answers(*combinations):
    """Each argument is a list of {field: value}; all products of them are built."""
    wrong = []
    for parts in itertools.product(*combinations):
        fields = {name: value for part in parts for name, value in part.items()}
        spec = Spec(**fields)
        if is_refused(spec) != bool(why_not(spec)):
            wrong.append((fields, why_not(spec)))
    assert not wrong


def each(name: str, values) -> list[dict]:
    return [{name: value} for value in values]


@pytest.mark.parametrize("name", FORMATS)
def test_scale_options_are_refused_where_the_oracle_refuses_them(name):
    assert_same_answers(
        [{"format": name}],
        each("scale_rule", RULES),
        each("scale_bound", [0, 256, 448]),
        each("scale_rounding", ["rne", "sr"]),
    )
    assert_same_answers(
        [{"format": name}],
        each("sr_headroom", [False, True]),
        each("rounding", ["rne", "sr", "sr32"]),
        each("fp32_scale", ["exact", "pow2"]),
    )


@pytest.mark.parametrize("name", [name for name, kind in FORMATS.items() if kind.element])
def test_blocks_are_refused_where_the_oracle_refuses_them(name):
    sizes = [(1, 16), (16, 16), (1, 3), (2, 4), (0, 0), (0, 16), (16, 0), (-1, 16), (3, 1)]
    assert_same_answers([{"format": name}], each("block", sizes), each("scale_rounding", ["rne", "sr"]))


@pytest.mark.parametrize("name", FORMATS)
def test_amax_policies_are_refused_where_the_oracle_refuses_them(name):
    blocks = [{}, {"block": (0, 0)}] if FORMATS[name].fp32 == "block" else [{}]
    policies = each("amax_policy", ["current", "delayed", "interval", "history"])
    assert_same_answers([{"format": name}], blocks, policies)


def test_ms_eden_is_refused_outside_its_conditions():
    base = {"rounding": "ms-eden", "rht": 32}
    changes = [
        {},
        {"rht": 0},
        {"rht": 8},
        {"rht": 16},
        {"rht": 128},
        {"format": "nvfp4-double"},
        {"block": (16, 16)},
    ]
    changes += [
        {"scale_rule": "4over6-mse"},
        {"scale_rounding": "sr"},
        {"scale_bound": 448},
        {"format": "nve1m2"},
    ]
    assert_same_answers([base], changes)


def test_signs_and_outer_blocks_are_refused_where_the_oracle_refuses_them():
    assert_same_answers(each("rht", [0, 8, 16, 32, 128]), each("rht_signs", ["", "te16", "fixed:3", "none"]))
    outers = [None, (1, 16), (1, 128), (1, 24), (4, 64), (3, 16)]
    for block in [(1, 16), (2, 32)]:
        assert_same_answers([{"format": "nvfp4-double", "block": block}], each("outer", outers))
    assert_same_answers(each("format", ["nvfp4", "mxfp4", "fp8"]), each("outer", [None, (1, 128)]))


def test_an_adaptive_layout_needs_its_own_amax():
    for policy in ("current", "delayed"):
        spec = Spec(adaptive="outer", amax_policy=policy)
        assert is_refused(spec) == bool(why_not(spec))


@pytest.mark.parametrize(
    "fields",
    [
        *[
            {"format": "nvfp5"},
            {"rounding": "nearest"},
            {"rht": 24},
            {"rht_signs": "random"},
            {"rht_signs": "fixed:x"},
        ],
        *[
            {"scale_rule": "min"},
            {"scale_bound": 300},
            {"amax_policy": "never"},
            {"amax_interval": 0},
            {"amax_interval": 1 << 32},
        ],
        *[{"amax_history": 0}, {"adaptive": "both"}, {"fp32_scale": "pow3"}, {"source": "fp16"}],
    ],
)
def test_values_outside_the_table_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        fourbits_spec(Spec(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        *[{"block": size} for size in (16, (16,), [1, 16], (1.0, 16), (True, 16), "1x16", (1, 16, 1))],
        *[
            {"outer": 128, "format": "nvfp4-double"},
            {"rht": 16.0},
            {"rht": True},
            {"rht": "16"},
            {"format": None},
        ],
        *[{"rht_signs": 5, "rht": 16}, {"amax_headroom": "2"}, {"amax_interval": 1.5}, {"te_compat": "no"}],
    ],
)
def test_values_of_another_type_are_refused_by_name(fields: dict[str, Any]):
    name = next(iter(fields))
    with pytest.raises(ValueError, match=rf"OperandSpec\.{name}: must be .*, got "):
        OperandSpec(**fields)
