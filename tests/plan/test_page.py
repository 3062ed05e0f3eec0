"""The page of a plan: its figures are the plan's, in the data that it carries and on the screen."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fourbits.cli.main import main
from fourbits.compare.number_format import long_duration
from fourbits.compare.report.plan_page import plan_page
from fourbits.plan.estimate import Prices, estimate
from fourbits.plan.gpus import GPUS
from fourbits.plan.grid import Grid, gpu_counts, grid, lengths_of, with_length
from fourbits.plan.machine import Machine
from fourbits.plan.rates import DECLARED
from fourbits.plan.search import usable_ranks
from fourbits.plan.software import FOURBITS
from fourbits.train.preset_figures import with_expected_vocabulary
from fourbits.train.presets import RUN_PRESETS

CONFIG = with_expected_vocabulary(RUN_PRESETS["hybrid-8b"])
GRID = grid(CONFIG, GPUS["h100"], 64)
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
#: (recipe, length, GPUs, price of an hour, of a kWh)
STATES = [
    ("fp8", 8192, 7, 0.0, 0.0),  # no choice: the page starts as it does without an address
    ("nvfp4", 8192, 64, 2.5, 0.1),
    ("bf16", 2048, 32, 0.0, 0.0),
    ("mxfp4", 4096, 1, 4.0, 0.3),
]


@pytest.fixture(scope="module")
def plans() -> Grid:
    return grid(CONFIG, GPUS["h100"], 64)


@pytest.fixture(scope="module")
def page(plans: Grid, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    text = plan_page("hybrid-8b", CONFIG, GPUS["h100"], plans, Prices(gpu_hour=3.0))
    path.write_text(text, encoding="utf-8")
    return path


def test_the_command_writes_a_page(tmp_path, capsys):
    path = tmp_path / "tiny.html"
    assert main(["plan", "tiny", "--gpu", "h100", "--price", "2", "--html", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert data(path)["prices"] == [2.0, 0.0]


def data(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="grid">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def test_every_choice_has_a_plan_or_does_not_fit(plans):
    keys = {f"{r}/{n}/{g}" for r in plans.recipes for n in plans.lengths for g in plans.gpus}
    assert set(plans.cells) == keys
    assert plans.start == "nvfp4/8192/64"
    assert plans.cells["nvfp4/8192/1"] is None  # 16 bytes per parameter are 129 GB


def test_counts_share_the_sequences_of_every_length():
    for count in gpu_counts(CONFIG, 64):
        for length in lengths_of(CONFIG):
            run = with_length(CONFIG, length)
            assert usable_ranks(run.train.samples_per_step, count) == count
            assert run.train.tokens_per_step == CONFIG.train.tokens_per_step


def test_a_cell_is_the_plan_of_its_choice(plans):
    cell = plans.cells["nvfp4/4096/64"]
    found = estimate(with_length(CONFIG, 4096), Machine(GPUS["h100"], DECLARED, FOURBITS), 64)
    assert cell is not None
    assert cell["step_seconds"] == found.step_seconds
    assert cell["memory_bytes"] == pytest.approx(sum(size for _, size in cell["memory"]))
    assert cell["step_seconds"] == pytest.approx(sum(seconds for _, seconds in cell["step"]))
    assert cell["seconds"] == found.seconds


def test_the_page_contains_everything_it_shows_and_its_data_are_the_grid(page: Path, plans: Grid):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="', text)
    assert "http" not in text.replace("https://", "http://").partition("<script")[0]
    found = data(page)
    assert found["cells"] == json.loads(json.dumps(plans.cells))
    assert found["prices"] == [3.0, 0.0]
    assert "Predicted, not measured." in text


@pytest.mark.skipif(not CHROMIUM, reason="needs a browser on the machine; the page's data are tested above")
@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_browser_shows_the_figures_of_the_plan(state, page: Path, plans: Grid):
    recipe, length, gpus, price, kwh = state
    where = f"{page.as_uri()}#recipe={recipe}&length={length}&gpus={gpus}&price={price}&kwh={kwh}"
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom")
    shown = subprocess.run([CHROMIUM, *flags, where], capture_output=True, text=True, timeout=120).stdout
    headline = html.unescape(re.search(r'<h1 id="headline"[^>]*>(.*?)</h1>', shown)[1])  # pyright: ignore[reportOptionalSubscript]
    gpus = gpus if gpus in plans.gpus else 64
    cell = plans.cells[f"{recipe}/{length}/{gpus}"]
    if cell is None:
        assert headline == f"Does not fit on {gpus} GPU"
        return
    cost = cell["gpu_hours"] * price + cell["megawatt_hours"] * 1000 * kwh
    paid = f", for {cost:,.0f}" if cost else ""
    assert headline == f"{long_duration(cell['seconds'])} on {gpus} GPUs{paid}"
    row = re.search(rf'<tr data-recipe="{recipe}" class="chosen">(.*?)</tr>', shown)
    assert row is not None
    texts = re.findall(r"<td>(.*?)</td>", row[1])
    assert texts[1] == f"{cell['tokens_per_second']:,.0f}"
    assert texts[4] == f"{cell['memory_bytes'] / 2**30:,.1f}"
    assert texts[-1] == (f"{cost:,.0f}" if cost else "\u2013")


def test_a_cost_is_hours_and_energy_at_their_prices(plans):
    machine = Machine(GPUS["h100"], DECLARED, FOURBITS)
    found = estimate(CONFIG, machine, 64)
    cell = plans.cells["nvfp4/8192/64"]
    assert cell is not None
    expected = cell["gpu_hours"] * 2.5 + cell["megawatt_hours"] * 1000 * 0.1
    assert found.cost(Prices(gpu_hour=2.5, kwh=0.1)) == pytest.approx(expected)
