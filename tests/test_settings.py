"""The settings loader: what it accepts, what it refuses, and what its refusals say."""

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourbits.settings import build, dump_yaml, load_yaml, override, to_dict
from fourbits.yaml_text import parse_yaml


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    until: float
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    kind: Literal["linear"] = "linear"
    end: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine:
    kind: Literal["cosine"] = "cosine"
    end: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 10
    decay: Linear | Cosine | None = None

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, got {self.lr}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    name: str
    optim: Optim = field(default_factory=Optim)
    phases: tuple[Phase, ...] = (Phase(until=1.0),)
    activation: Literal["relu2", "swiglu"] = "relu2"
    colour: Colour = Colour.RED
    out: Path | None = None
    seed: int | None = None
    label: str | None = None
    size: Literal["auto"] | int = "auto"
    extra: Optim | None = None
    layers: dict[str, Optim] = field(default_factory=dict)
    flag: bool = False


FULL = Run(
    name="1e3",
    optim=Optim(lr=3e-4, decay=Cosine(end=0.2)),
    phases=(Phase(until=0.7, weights={"prose": 0.5, "code": 0.5}), Phase(until=1.0)),
    colour=Colour.BLUE,
    out=Path("runs/a"),
    size=3,
    extra=Optim(),
    layers={"head": Optim(warmup_steps=0)},
    flag=True,
)


@pytest.mark.parametrize("run", [Run(name="a"), FULL], ids=["defaults", "everything set"])
def test_to_dict_dump_load_and_build_give_an_equal_object(run, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(to_dict(run)))
    assert build(Run, load_yaml(path), where=str(path)) == run


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(max_size=5), scalars | st.lists(scalars, max_size=3), max_size=4))
def test_dumped_yaml_reads_back_as_the_same_values_and_types(tree):
    from_text = parse_yaml(dump_yaml(tree), "text")
    assert from_text == tree
    assert repr(from_text) == repr(tree)


def test_yaml_scalars_follow_the_core_rules_of_yaml_1_2(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "a: 3e-4\nb: no\nc: 1:30\nd: 010x\ne: 1_000\nf: .inf\ng: 2024-01-01\nh: 0x10\ni: 1.\nj: ~\n"
    )
    assert load_yaml(path) == {
        "a": 3e-4, "b": "no", "c": "1:30", "d": "010x", "e": 1000, "f": math.inf,
        "g": "2024-01-01", "h": 16, "i": 1.0, "j": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nme": "x"}, "config: unknown key 'nme'. Did you mean 'name'? Known keys: name, optim,"),
        ({}, "config: needs a value for name, got none. Add its key."),
        ({"name": 3}, "config: name must be text, got 3."),
        ({"optim": {"lrr": 1}}, "config: optim: unknown key 'lrr'. Did you mean 'lr'?"),
        ({"optim": {"lr": "fast"}}, "config: optim.lr must be a number, got 'fast'."),
        ({"optim": {"lr": True}}, "config: optim.lr must be a number, got True."),
        ({"optim": {"lr": -1}}, "config: optim: lr must be positive, got -1.0."),
        ({"optim": {"warmup_steps": 1.5}}, "config: optim.warmup_steps must be a whole number, got 1.5."),
        ({"optim": {"betas": [0.9]}}, "config: optim.betas must be a list [a number, a number], got [0.9]."),
        ({"optim": 3}, "config: optim must be a mapping of keys to values, got 3."),
        ({"phases": {"until": 1}}, "config: phases must be a list [...] in which each is a mapping"),
        ({"phases": [{"until": "x"}]}, "config: phases.0.until must be a number, got 'x'."),
        ({"phases": [{"until": 1, "weights": {"a": "b"}}]}, "config: phases.0.weights.a must be a number"),
        (
            {"activation": "swigl"},
            "activation must be one of 'relu2', 'swiglu', got 'swigl'. Did you mean 'swiglu'?",
        ),
        ({"colour": "green"}, "config: colour must be one of 'red', 'blue', got 'green'."),
        ({"seed": "one"}, "config: seed must be a whole number or null, got 'one'."),
        ({"size": "auot"}, "config: size must be 'auto' or a whole number, got 'auot'. Did you mean 'auto'?"),
        ({"flag": 1}, "config: flag must be true or false, got 1."),
        ({"extra": {"lrr": 1}}, "config: extra: unknown key 'lrr'. Did you mean 'lr'?"),
        ({"optim": {"decay": {"kind": "sine"}}}, "config: optim.decay must be a mapping"),
        ({"layers": {"head": {"lr": None}}}, "config: layers.head.lr must be a number, got None."),
    ],
)
def test_a_refusal_names_the_place_the_rule_and_the_value(changes, message):
    with pytest.raises(ValueError) as error:
        build(Run, changes if changes in ({}, {"nme": "x"}) else {"name": "a", **changes})
    assert message in str(error.value)


def test_a_whole_float_is_a_whole_number_because_token_counts_are_written_1e6():
    steps = build(Optim, {"warmup_steps": 1e6}).warmup_steps
    assert steps == 1_000_000
    assert type(steps) is int


def test_a_union_of_dataclasses_is_told_apart_by_its_literal():
    assert build(Optim, {"decay": {"kind": "cosine"}}).decay == Cosine()
    assert build(Optim, {"decay": {"end": 0.5}}).decay == Linear(end=0.5)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("optim.lr", "3e-4", lambda r: r.optim.lr == 3e-4),
        ("optim.betas", "[0.8, 0.9]", lambda r: r.optim.betas == (0.8, 0.9)),
        ("phases.0.until", "0.5", lambda r: r.phases[0].until == 0.5),
        ("name", "123", lambda r: r.name == "123"),
        ("name", "null", lambda r: r.name == "null"),
        ("label", "null", lambda r: r.label is None),
        ("label", "12", lambda r: r.label == "12"),
        ("seed", "12", lambda r: r.seed == 12),
        ("size", "64", lambda r: r.size == 64),
        ("out", "2024", lambda r: r.out == Path("2024")),
        ("flag", "true", lambda r: r.flag is True),
        ("colour", "blue", lambda r: r.colour is Colour.BLUE),
        ("extra.lr", "1", lambda r: r.extra == Optim(lr=1.0)),
        ("extra", "{lr: 2.0}", lambda r: r.extra == Optim(lr=2.0)),
        ("layers.head.lr", "0.5", lambda r: r.layers == {"head": Optim(lr=0.5)}),
        ("optim.decay.kind", "cosine", lambda r: r.optim.decay == Cosine()),
        ("seed", 7, lambda r: r.seed == 7),
    ],
)
def test_an_override_reaches_every_kind_of_field(path, text, expected):
    assert expected(override(Run(name="a"), {path: text}))


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("optm.lr", "1", "override: unknown key 'optm'. Did you mean 'optim'?"),
        ("lr", "1", "override: unknown key 'lr'. Did you mean 'optim.lr'?"),
        ("optim.lr", "fast", "override: optim.lr must be a number, got 'fast'."),
        ("optim.lr", "[1,", "override: optim.lr must be a number, got '[1,'."),
        ("name.first", "x", "override: name.first: name is 'a', which holds no keys. Set name itself."),
        ("phases.4.until", "1", "override: phases.4.until: '4' must be a position from 0 to 0."),
        ("optim.lr", "-1", "override: optim: lr must be positive, got -1.0."),
    ],
)
def test_an_override_is_checked_like_a_file(path, text, message):
    with pytest.raises(ValueError) as error:
        override(Run(name="a"), {path: text})
    assert message in str(error.value)


def test_an_override_leaves_the_original_alone():
    run = Run(name="a", layers={"head": Optim()})
    assert override(run, {"layers.head.lr": "9"}).layers["head"].lr == 9
    assert run.layers["head"].lr == 1e-3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: [1\n", ", line 3: not valid YAML: "),
        (b"a: 1\nb: 2\na: 3\n", ", line 3: not valid YAML: the key 'a' is given twice."),
        (b"", ": must hold a mapping of keys to values, got an empty file."),
        (b"- 1\n", ": must hold a mapping of keys to values, got a list."),
        (b"a: \xff\n", ": must be UTF-8 text, byte 3 is not."),
        (b"a: !!python/object/apply:os.system [ls]\n", ", line 1: not valid YAML: could not determine"),
        (b"a: \x00\n", ": not valid YAML: "),
        (b"a: " + b"[" * 5000, ": not valid YAML: "),
    ],
)  # fmt: skip
def test_a_broken_file_is_named_with_its_line(content, message, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        load_yaml(path)
    assert f"{path}{message}" in str(error.value)


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_yaml(tmp_path / "none.yaml")
