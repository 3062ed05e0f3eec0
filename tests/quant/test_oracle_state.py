"""What docs/nvfp4.md promises of amax policies (16), adaptive layouts (17) and stochastic updates (18)."""

from fractions import Fraction

import pytest

from oracle.floats import BF16, FP32
from oracle.policies import (
    AmaxState,
    amax_used,
    block_counts,
    chooses_other,
    commit,
    observe,
    outer_counts,
)
from oracle.spec import Spec
from oracle.update import rounded_update, update_bf16

OWN = [5, 2, 9, 3, 3, 8, 0, 4]


def run(spec: Spec, own: list[int] = OWN) -> list[Fraction]:
    """The amax used at every step, one forward a step."""
    state, used = AmaxState(), []
    for step, value in enumerate(own):
        amax, observed = amax_used(state, spec, step, FP32.of(value))
        used.append(FP32.value(amax))
        state = commit(observe(state, FP32.of(value)) if observed else state, spec)
    return used


def test_each_policy_uses_the_amax_of_the_steps_it_names():
    assert run(Spec()) == OWN
    assert run(Spec(amax_policy="delayed")) == [
        5,
        5,
        2,
        9,
        3,
        3,
        8,
        4,
    ]  # own at the first step, and after a 0
    assert run(Spec(amax_policy="history", amax_history=3)) == [5, 5, 5, 9, 9, 9, 8, 8]
    assert run(Spec(amax_policy="interval", amax_interval=3)) == [5, 5, 5, 3, 3, 3, 0, 4]


def test_policies_coincide_where_they_should():
    assert run(Spec(amax_policy="history", amax_history=1)) == run(Spec(amax_policy="delayed"))
    assert run(Spec(amax_policy="interval", amax_interval=1)) == run(Spec())


def test_headroom_multiplies_what_is_remembered_and_ends_at_the_largest_number():
    spec = Spec(amax_policy="delayed", amax_headroom=1.5)
    assert run(spec, [4, 4, 4]) == [4, 6, 6]
    large = AmaxState((FP32.largest,))
    assert amax_used(large, spec, 1, FP32.of(1))[0] == FP32.largest


def test_observing_twice_or_something_infinite_changes_nothing():
    once = observe(AmaxState(), FP32.of(3))
    assert observe(once, FP32.of(3)) == once
    assert observe(once, FP32.of(2)) == once
    assert observe(once, FP32.inf) == once
    assert observe(AmaxState(), FP32.nan) == AmaxState()
    assert commit(AmaxState((7,)), Spec(amax_policy="delayed")) == AmaxState((7,))


def test_outer_blocks_are_chosen_when_more_than_a_64th_of_scales_is_subnormal():
    loud, quiet = [FP32.of(1000)] + [FP32.of(1)] * 15, [FP32.of(Fraction(1, 1000))] * 16
    few, many = [loud * 7 + quiet] * 8, [loud * 8] * 16 + [loud * 7 + quiet] * 3
    assert (outer_counts(few).n, outer_counts(few).m) == (64, 8)
    assert chooses_other("outer", outer_counts(few))
    assert (outer_counts(many).n, outer_counts(many).m) == (152, 3)
    assert chooses_other("outer", outer_counts(many))
    assert not chooses_other("outer", outer_counts(many[:-1]))
    assert outer_counts([[0] * 32]).n == 0


def test_rows_are_chosen_when_more_than_a_quarter_of_them_is_two_octaves_below_their_tile():
    loud, quarter, quiet = ([FP32.of(v)] * 16 for v in (8, 2, Fraction(15, 8)))
    assert block_counts([loud] * 12 + [quiet] * 4).m == 4
    assert block_counts([loud] * 12 + [quarter] * 4).m == 0
    assert not chooses_other("block", block_counts([loud] * 12 + [quiet] * 4))
    assert chooses_other("block", block_counts([loud] * 11 + [quiet] * 5))
    assert block_counts([[0] * 16] * 16 + [loud] * 3).n == 3


@pytest.mark.parametrize("z", [0x3F804000, 0xBF80C001, 0x00000001, 0x80012345, 0x3F800000])
def test_an_update_moves_away_from_zero_as_often_as_its_low_bits_say(z):
    stored = [rounded_update(z, r) for r in range(1 << 16)]
    assert set(stored) <= {z >> 16, (z >> 16) + 1}
    assert stored.count((z >> 16) + 1) == z & 0xFFFF


def test_an_update_never_becomes_infinite_and_keeps_what_is_not_finite():
    assert rounded_update(0x7F7FFFFF, 0xFFFF) == BF16.largest
    assert rounded_update(0xFF7FFFFF, 0xFFFF) == BF16.largest | BF16.sign
    assert rounded_update(FP32.inf, 0xFFFF) == BF16.inf
    assert BF16.is_nan(rounded_update(FP32.nan, 0))


def test_update_bits_depend_on_every_coordinate():
    base = {"seed": 3, "step": 4, "index": 5, "i": 6, "j": 7}
    z = [0x3F808000 + 37 * k for k in range(64)]

    def stored(**changed: int) -> list[int]:
        place = base | changed
        return [update_bf16(z[k], **(place | {"j": place["j"] + 8 * k})) for k in range(64)]

    for name, value in base.items():
        assert stored(**{name: value + 1}) != stored()
