"""The report: one self-contained page that shows the results of the runs and claims nothing more."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from fourbits.compare.number_format import loss, signed
from fourbits.compare.report.caveats import caveats
from fourbits.compare.report.comparison import Comparison
from fourbits.compare.report.comparison_report import headline, render
from fourbits.compare.report.context import Context, Corpus, Sample, Source
from fourbits.compare.report.page import environment
from fourbits.compare.report.run_report import write_run_report
from fourbits.compare.report.table import final_table
from support.fabricated_runs import RECIPES, SAME_LOAD, fabricate_comparison, fabricate_run

CORPUS = Corpus(
    sources=(
        Source(
            name="code",
            documents=612,
            text_bytes=9_100_000,
            tokens=2_800_000,
            license="PSF-2.0",
            unigram_entropy=5.9,
        ),
    ),
    unigram_entropy=6.02,
    vocabulary=2048,
    tokenizer_sha256="ab" * 32,
)
SAMPLE = Sample(
    recipe="nvfp4",
    seed=0,
    temperature=0.7,
    source="code",
    prompt="if a <",
    continuation=' b & c: print("</pre>")',
)
CONTEXT = Context(commands=("fourbits demo --out runs/demo",), corpus=CORPUS, sample=SAMPLE)


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return fabricate_comparison(tmp_path_factory.mktemp("runs"), list(RECIPES), [0])


@pytest.fixture(scope="module")
def page(one_seed: Comparison) -> str:
    return render(one_seed, CONTEXT)


class Reader(HTMLParser):
    """Checks nesting, and collects attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    return reader


def test_the_page_loads_nothing_and_has_no_scripts(page: str):
    reader = read(page)
    loading = [
        value for _, name, value in reader.attributes if name in ("src", "href", "srcset", "xlink:href")
    ]
    assert all(value is not None and value.startswith("#") for value in loading)
    assert "@import" not in page
    assert "<script" not in page
    assert not re.search(r"url\((?!#)", page)
    assert not [name for _, name, _ in reader.attributes if name.startswith("on")]


def test_ids_are_unique_over_all_charts(page: str):
    ids = [value for _, name, value in read(page).attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 0


def test_the_page_shows_the_numbers_of_the_table(one_seed: Comparison, page: str):
    text = read(page).text
    for row in final_table(one_seed):
        assert row.recipe in text
        assert loss(row.val_loss) in text
        if row.recipe != "bf16":
            assert signed(row.gap_percent, 2) in text


def test_each_chart_has_a_wide_and_a_narrow_form(page: str):
    assert page.count('class="wide"') == page.count('class="narrow"') == 2


def test_a_caption_explains_the_marks_of_data_phases_only_where_there_are_some(page: str, tmp_path: Path):
    assert "Dotted: a new data phase begins" in page
    comparison = fabricate_comparison(tmp_path, ["bf16", "nvfp4"], [0])
    plan = comparison.any_run.manifest["data"]["plan"]
    plan["phases"] = plan["phases"][:1]
    assert "Dotted" not in render(comparison, CONTEXT)


def test_wide_tables_scroll_in_their_own_box(page: str):
    assert page.count("<table") == page.count('<div class="scroll"')


def test_text_from_the_corpus_and_the_model_is_escaped(page: str):
    assert SAMPLE.continuation in read(page).text
    assert "</pre>&quot;" not in page
    assert "&lt;/pre&gt;" in page


def test_every_colour_that_is_used_is_set(page: str):
    used, given = set(re.findall(r"var\((--[\w-]+)\)", page)), set(re.findall(r"(--[\w-]+):", page))
    assert used <= given


def test_the_page_shows_how_many_runs_shared_the_machine(page: str, one_seed: Comparison):
    assert "2 runs in parallel, 1 thread each" in page
    assert "their memory adds up" in page
    alone = dict.fromkeys(one_seed.provenance, replace(SAME_LOAD, jobs=1, threads=2))
    other = render(replace(one_seed, provenance={**alone, ("nvfp4", 0): None}), CONTEXT)
    assert "1 run at a time, 2 threads each; resumed across sessions" in other
    assert "their memory adds up" not in other


def test_with_one_seed_the_headline_claims_nothing(one_seed: Comparison, page: str):
    text = headline(one_seed, final_table(one_seed))
    assert text == (
        "bf16, fp8, mxfp4, nvfp4 and nvfp4-naive trained with one seed: too few to compare their losses."
    )
    assert text in read(page).text
    assert "no difference between losses here is a finding" in page


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return fabricate_comparison(tmp_path_factory.mktemp("three"), ["bf16", "fp8", "nvfp4"], [0, 1, 2])


def test_with_several_seeds_the_headline_is_the_interval_of_the_gap(three_seeds: Comparison):
    rows = [
        replace(row, gap_nats=0.0412, gap_percent=1.234, gap_nats_margin=0.01)
        for row in final_table(three_seeds)
    ]
    assert headline(three_seeds, rows) == (
        "nvfp4 ends 1.23 % above bf16 after 524k tokens (+0.0412 nats, 95 % interval +0.0312 to +0.0512, "
        "3 seeds)."
    )


def test_a_gap_whose_interval_includes_zero_is_no_difference(three_seeds: Comparison):
    rows = [replace(row, gap_nats=0.001, gap_nats_margin=0.002) for row in final_table(three_seeds)]
    assert headline(three_seeds, rows) == (
        "No difference between nvfp4 and bf16 shown after 524k tokens (+0.0010 nats, 95 % interval "
        "\u22120.0010 to +0.0030, 3 seeds)."
    )
    assert "The intervals of fp8 and nvfp4 include zero" in caveats(three_seeds, rows)[0]


def test_the_page_shows_the_margin_of_each_gap(three_seeds: Comparison):
    text = read(render(three_seeds, CONTEXT)).text
    for row in final_table(three_seeds)[1:]:
        assert signed(row.gap_nats, 4, row.gap_nats_margin) in text


def test_a_run_that_fails_in_its_first_steps_is_reported_with_the_others(tmp_path: Path):
    base = fabricate_run(tmp_path / "a", "bf16")
    lost = fabricate_run(tmp_path / "b", "nvfp4", non_finite_at=3)
    runs = {"bf16": {0: base}, "nvfp4": {0: lost}}
    comparison = Comparison("fabricated", "bf16", runs, {("bf16", 0): SAME_LOAD, ("nvfp4", 0): SAME_LOAD})
    page = render(comparison, Context(commands=("fourbits compare",)))
    assert "nvfp4 did not reach its last step: step 3: the loss is nan. The update was skipped." in page


def test_a_single_recipe_has_a_report_without_gaps(tmp_path: Path):
    page = render(fabricate_comparison(tmp_path, ["mxfp4"], [0], steps=64), CONTEXT)
    assert "mxfp4 reaches a validation loss of" in page
    assert "Gap to" not in page


def test_a_single_run_has_its_own_page(tmp_path: Path):
    fabricate_run(tmp_path / "run", "nvfp4")
    page = write_run_report(tmp_path / "run").read_text()
    reader = read(page)
    assert "nvfp4: validation loss" in reader.text
    assert "Learning rate" in reader.text
    assert page.count('class="wide"') == 4


@pytest.mark.parametrize(("steps", "charts"), [(1, 0), (2, 4)])
def test_a_run_has_charts_where_they_show_a_line_and_else_its_values(tmp_path: Path, steps: int, charts: int):
    fabricate_run(tmp_path / "run", "nvfp4", steps=steps)
    page = write_run_report(tmp_path / "run").read_text()
    assert page.count('class="wide"') == charts
    assert ("Gradient norm before clipping</dt>" in page) == (charts == 0)


def test_a_metric_that_was_never_finite_has_no_chart(tmp_path: Path):
    run = fabricate_run(tmp_path / "run", "nvfp4", steps=12)
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    text = "".join(json.dumps({**record, "grad_norm": None}) + "\n" for record in records)
    (run.path / "metrics.jsonl").write_text(text)
    page = write_run_report(run.path).read_text()
    assert "Learning rate" in page
    assert "Gradient norm" not in page


def test_a_run_without_validation_or_end_has_a_page_too(tmp_path: Path):
    run = fabricate_run(tmp_path / "run", "nvfp4", steps=12)
    (run.path / "summary.json").unlink()
    page = write_run_report(run.path).read_text()
    assert "nvfp4: training loss" in page
    assert "still running, or killed" in page


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="not a run folder"):
        write_run_report(tmp_path)


def test_attributes_and_text_are_escaped_and_charts_are_not(tmp_path: Path):
    run = fabricate_run(tmp_path / "run", "nvfp4", steps=12)
    manifest = json.loads((run.path / "manifest.json").read_text())
    reason = """a < b & c, "quoted" and 'quoted'"""
    manifest["precision"]["linears"][0]["reason"] = reason
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    page = write_run_report(run.path).read_text()
    reader = read(page)
    assert reason in reader.text
    assert [value for _, name, value in reader.attributes if name == "title" and reason in (value or "")]
    assert page.count("a &lt; b &amp; c, &#34;quoted&#34; and &#39;quoted&#39;") == 3
    assert "<svg" in page


def test_a_value_that_a_template_lacks_is_an_error():
    with pytest.raises(UndefinedError, match="nothing"):
        environment().from_string("{{ nothing }}").render()


def test_a_switch_of_precision_is_marked_with_its_name_on_the_charts(tmp_path):
    fabricate_run(tmp_path / "run", "nvfp4")
    plain = write_run_report(tmp_path / "run").read_text()
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    phases = (("start", 1, 40), ("late switch", 201, None), ("never reached", 257, None))
    manifest["schedule"] = [{"name": n, "first_step": a, "last_step": b} for n, a, b in phases]
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    marked = write_run_report(tmp_path / "run").read_text()
    for name in ("start ends", "late switch", "the precision changes"):
        assert name in marked, name
        assert name not in plain, name
    assert "never reached" not in marked


def sample(step: int, *alarms: str) -> dict:
    """A line of health.jsonl."""
    shares = {"at_max": 0.02, "at_zero": 0.0, "zeros": 0.07, "clipped": None, "snr_db": 20.1}
    layer = {
        "name": "blocks.4.mixer.up_proj",
        "operands": {"fprop.lhs": shares, "fprop.rhs": shares},
        "snr_db": {"fprop": 16.8, "dgrad": None, "wgrad": 17.1},
        "gradient_to_noise": 7.2,
        "dead": 0.0,
        "rows": {"x": [0.0, 1.0], "dy": [None, None]},
        "oscillating": None,
        "returning": None,
        "stale": [],
    }
    raised = [{"kind": kind, "layers": [layer["name"]], "text": f"{kind} in <it>"} for kind in alarms]
    return {"step": step, "layers": [layer], "alarms": raised, "unseen": ["a", "b"]}


def test_a_run_page_shows_the_health_of_its_layers(tmp_path):
    fabricate_run(tmp_path / "run", "nvfp4")
    assert "Health of quantized layers" not in write_run_report(tmp_path / "run").read_text()
    lines = [sample(64), sample(128, "noise"), sample(192, "noise"), sample(256)]
    (tmp_path / "run/health.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for record in metrics:
        if record["kind"] == "train" and record["step"] % 64 == 0:
            record |= {"health_snr_fprop": 16.5, "health_gradient_to_noise": 7.0}
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    page = " ".join(write_run_report(tmp_path / "run").read_text().split())
    assert "<b>Noise</b>, in 2 of 4 samples, steps 128 to 192: noise in &lt;it&gt;." in page
    assert "All layers after step 256 (2 not sampled)" in page
    for cell in ("blocks.4.mixer.up_proj", "<td>16.8</td>", "<td>17.1</td>", "<td>7.0", "alarm 1.73"):
        assert cell in page, cell
    assert "Signal-to-noise ratio of GEMMs" in page
    (tmp_path / "run/health.jsonl").write_text(json.dumps(sample(64)) + "\n")
    assert "No alarm in any sample." in write_run_report(tmp_path / "run").read_text()
