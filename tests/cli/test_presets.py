"""`fourbits presets`: every preset with its tokens, memory and time; what is measured and what is a bound."""

import json

import pytest

from fourbits.cli.main import main
from fourbits.train.preset_figures import MEASURED, UTILIZATION, figures_of, preset_figures
from fourbits.train.presets import RUN_PRESETS


def test_every_preset_is_listed_once_in_order(capsys: pytest.CaptureFixture[str]):
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(RUN_PRESETS)


def test_json_has_the_figures_of_the_table(capsys: pytest.CaptureFixture[str]):
    assert main(["presets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found] == list(RUN_PRESETS)
    assert {each["name"] for each in found if each["measured"]} == set(MEASURED)


def test_a_measured_preset_takes_its_tokens_at_the_measured_speed():
    found = figures_of("30m", RUN_PRESETS["30m"])
    assert found.measured is not None
    assert found.seconds is not None
    assert found.seconds[0] == found.seconds[1] == found.tokens / found.measured.tokens_per_second
    assert found.tokens >= (RUN_PRESETS["30m"].train.tokens or 0) > 0


def test_the_time_of_others_is_between_the_bounds_of_the_measured_utilizations():
    found = figures_of("100m", RUN_PRESETS["100m"])
    assert found.measured is None
    assert found.seconds is not None
    low, high = found.seconds
    assert high / low == pytest.approx(UTILIZATION[1] / UTILIZATION[0])
    # 6 FLOPs per parameter and token are most of the work: 5.6 s per 1e15 at 978 TFLOP/s and 18 % of it.
    assert low < 6 * found.parameters * found.tokens / (989.4e12 * UTILIZATION[0]) < 2 * high


def test_a_model_whose_states_exceed_a_gpu_has_no_time_on_one():
    found = {each.name: each for each in preset_figures()}
    assert found["hybrid-12b"].seconds is None
    assert found["hybrid-12b"].state_bytes == 16 * found["hybrid-12b"].parameters > 80e9
    assert 12.2e9 < found["hybrid-12b"].parameters < 12.4e9
