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
from fourbits.compare.report.plan_page import page_state, plan_page
from fourbits.compare.report.plan_tables import checkpoint_rows, gains_table, layout_rows, model_table
from fourbits.plan.assumptions import assumptions
from fourbits.plan.estimate import Prices, estimate, failures_for
from fourbits.plan.gpus import GPUS
from fourbits.plan.grid import Grid, gpu_counts, grid, lengths_of, with_length
from fourbits.plan.machine import Machine
from fourbits.plan.rates import DECLARED
from fourbits.plan.search import usable_ranks
from fourbits.plan.software import FOURBITS
from fourbits.train.preset_figures import with_expected_vocabulary
from fourbits.train.presets import RUN_PRESETS

CONFIG = with_expected_vocabulary(RUN_PRESETS["hybrid-8b"])
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
needs_a_browser = pytest.mark.skipif(
    not CHROMIUM, reason="needs a browser on the machine; the page's data are tested above"
)
#: (recipe, length, GPUs, price of an hour, of a kWh)
STATES = [
    ("fp8", 8192, 7, 0.0, 0.0),  # no choice: the page starts as it does without an address
    ("nvfp4", 8192, 64, 2.37, 0.123),  # between two marks of the sliders
    ("bf16", 2048, 32, 95.5, 0.0),  # beyond the end of a slider
    ("mxfp4", 4096, 1, 4.0, 0.3),
]


@pytest.fixture(scope="module")
def plans() -> Grid:
    return grid(CONFIG, GPUS["h100"], 64)


@pytest.fixture(scope="module")
def state(plans: Grid) -> dict[str, Any]:
    return page_state(plans, Prices(gpu_hour=3.0))


@pytest.fixture(scope="module")
def page(plans: Grid, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    text = plan_page("hybrid-8b", plans, Prices(gpu_hour=3.0))
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


def test_every_choice_has_a_plan_or_does_not_fit(plans, state):
    keys = {f"{r}/{n}/{g}" for r in plans.recipes for n in plans.lengths for g in plans.gpus}
    assert set(state["cells"]) == keys
    assert state["start"] == "nvfp4/8192/64"
    assert state["cells"]["nvfp4/8192/1"] is None  # 16 bytes per parameter are 129 GB


def test_counts_share_the_sequences_of_every_length_but_for_the_given_one():
    given = 100
    for count in gpu_counts(CONFIG, given):
        for length in lengths_of(CONFIG):
            run = with_length(CONFIG, length)
            assert run.train.tokens_per_step == CONFIG.train.tokens_per_step
            assert usable_ranks(run.train.samples_per_step, count) == count or count == given
    assert given in gpu_counts(CONFIG, given)


def test_gpus_that_compute_nothing_are_paid_for_on_the_page_as_in_the_text(tmp_path, capsys):
    path = tmp_path / "plan.html"
    command = ["plan", "100m", "--gpu", "h100", "--gpus", "100", "--price", "2"]
    assert main([*command, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert main([*command, "--html", str(path)]) == 0
    found = data(path)
    cell = found["cells"][found["start"]]
    (own,) = (each for each in text["recipes"] if each["recipe"] == "nvfp4")
    assert cell["gpu_hours"] * 2 == own["cost"]
    assert cell["layout"][0][1].startswith("64 of 100: ")


def test_a_cell_is_the_plan_of_its_choice(plans, state):
    cell = state["cells"]["nvfp4/4096/64"]
    config = with_length(CONFIG, 4096)
    machine = Machine(GPUS["h100"], DECLARED, FOURBITS)
    found = estimate(config, machine, 64)
    assert cell["step_seconds"] == found.step_seconds
    assert cell["memory_bytes"] == pytest.approx(sum(size for _, size in cell["memory"]))
    assert cell["step_seconds"] == pytest.approx(sum(seconds for _, seconds in cell["step"]))
    assert cell["seconds"] == found.seconds
    assert cell["layout"] == layout_rows(config, found)
    assert cell["checkpoints"] == checkpoint_rows(config, found, failures_for(config, found))


def test_a_page_has_the_tables_of_the_text(page: Path, plans: Grid):
    text = html.unescape(page.read_text(encoding="utf-8"))
    for table in (gains_table(plans.plan), model_table("hybrid-8b", plans.plan)):
        for row in table.rows:
            assert all(cell in text for cell in row)
    for line in assumptions(plans.plan):
        assert line in text


def test_the_page_says_what_fourbits_does_not_run(state):
    by_recipe = {key.partition("/")[0]: cell["units"] for key, cell in state["cells"].items() if cell}
    assert by_recipe == {
        "bf16": "",
        "fp8": "FP8 tensor cores",
        "mxfp4": "emulated in BF16",
        "nvfp4": "emulated in BF16",
    }
    native = page_state(grid(RUN_PRESETS["tiny"], GPUS["gb200"], 1), Prices())
    assert native["cells"][native["start"]]["units"] == "FP4 tensor cores, not yet run by fourbits"
    of_mx = native["cells"][native["start"].replace("nvfp4", "mxfp4")]["units"]
    assert of_mx == "tensor cores, which fourbits does not use"


def test_the_page_says_which_layouts_the_trainer_refuses(monkeypatch):
    reason = "parallel.tensor must be 1"
    monkeypatch.setattr(
        "fourbits.plan.estimate.unsupported", lambda layout: reason if layout.tensor > 1 else None
    )
    found = grid(RUN_PRESETS["hybrid-8b"], GPUS["rtx5090"], 8)
    refused = page_state(found, Prices())["cells"]["nvfp4/8192/8"]
    assert refused["cannot_run"] == reason
    assert ("not possible today", reason) in refused["layout"]


def test_the_page_contains_everything_it_shows_and_its_data_are_the_grid(page: Path, state):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="', text)
    assert "http" not in text.replace("https://", "http://").partition("<script")[0]
    assert data(page) == json.loads(json.dumps(state))
    assert data(page)["prices"] == [3.0, 0.0]
    assert "Predicted, not measured." in text


@pytest.mark.parametrize(("where", "why"), [("nowhere/plan.html", "does not exist"), (".", "is a folder")])
def test_a_page_that_cannot_be_written_is_refused_before_planning(where, why, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fourbits.cli.plan.grid", lambda *_: pytest.fail("planned first"))
    assert main(["plan", "tiny", "--gpu", "h100", "--html", str(tmp_path / where)]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.endswith("Pass one such as plan.html.\n")


def shown(page: Path, address: str = "", width: int = 1280) -> str:
    """The document after its script ran."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom")
    command = [CHROMIUM, *flags, f"--window-size={width},900", page.as_uri() + address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@needs_a_browser
@pytest.mark.parametrize("chosen", STATES, ids=str)
def test_a_browser_shows_the_figures_of_the_plan(chosen, page: Path, plans: Grid, state):
    recipe, length, gpus, price, kwh = chosen
    found = shown(page, f"#recipe={recipe}&length={length}&gpus={gpus}&price={price}&kwh={kwh}")
    headline = html.unescape(re.search(r'<h1 id="headline"[^>]*>(.*?)</h1>', found)[1])  # pyright: ignore[reportOptionalSubscript]
    gpus = gpus if gpus in plans.gpus else 64
    cell = state["cells"][f"{recipe}/{length}/{gpus}"]
    if cell is None:
        assert headline == f"Does not fit on {gpus} GPU"
        return
    cost = cell["gpu_hours"] * price + cell["megawatt_hours"] * 1000 * kwh
    paid = f", for {cost:,.0f}" if cost else ""
    assert headline == f"{long_duration(cell['seconds'])} on {gpus} GPUs{paid}"
    row = re.search(rf'<tr data-recipe="{recipe}" class="chosen">(.*?)</tr>', found)
    assert row is not None
    texts = [html.unescape(text) for text in re.findall(r"<td[^>]*>(.*?)</td>", row[1])][1:]
    assert texts[1] == f"{cell['tokens_per_second']:,.0f}"
    assert texts[5] == f"{cell['memory_bytes'] / 2**30:,.1f}"
    assert texts[7] == (f"{cost:,.0f}" if cost else "\u2013")
    assert texts[8:] == [cell["units"], cell["layout_text"]]
    assert f'<output id="price-value">{price:.2f}</output>' in found
    for setting, value in (*cell["layout"], *cell["checkpoints"]):
        assert f"<dt>{setting}</dt><dd>{html.escape(value, quote=False)}</dd>" in found


@needs_a_browser
@pytest.mark.parametrize("address", ["#price=-1&kwh=x", "#price=Infinity&kwh=NaN", "#price="])
def test_invalid_prices_become_those_that_the_page_starts_with(address, page: Path):
    found = shown(page, address)
    expected = "0.00" if address == "#price=" else "3.00"  # an empty number is 0 in a browser
    assert f'<output id="price-value">{expected}</output>' in found
    assert '<output id="kwh-value">0.00</output>' in found


@needs_a_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_only_tables_scroll_sideways(width, page: Path, tmp_path):
    measured = tmp_path / "measured.html"
    measure = "const e = document.documentElement; document.title = e.scrollWidth - e.clientWidth;"
    script = f"<script>{{ {measure} }}</script>"
    measured.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{script}</body>"), "utf-8")
    assert "<title>0</title>" in shown(measured, width=width)


def test_a_cost_is_hours_and_energy_at_their_prices(state):
    machine = Machine(GPUS["h100"], DECLARED, FOURBITS)
    found = estimate(CONFIG, machine, 64)
    cell = state["cells"]["nvfp4/8192/64"]
    expected = cell["gpu_hours"] * 2.5 + cell["megawatt_hours"] * 1000 * 0.1
    assert found.cost(Prices(gpu_hour=2.5, kwh=0.1)) == pytest.approx(expected)
