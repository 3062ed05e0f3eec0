"""Piped output has no box characters, and no line of a table wraps."""

import io
import json

import pytest
from rich.console import Console
from rich.table import Table

from fourbits.bench.timing import Measurements, Result
from fourbits.cli import bench
from fourbits.cli.main import main
from fourbits.compare.terminal import print_table

BOX = {chr(code) for code in range(0x2500, 0x2580)} | set("|")


@pytest.mark.parametrize(
    "argv", [["recipes", "list"], ["recipes", "show", "nvfp4"], ["doctor", "--device", "cpu"], ["presets"]]
)
def test_a_command_prints_no_boxes_into_a_pipe(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert not BOX & set(out)
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_a_recipe_is_one_line_of_the_piped_list(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes", "list", "--json"]) == 0
    recipes = json.loads(capsys.readouterr().out)
    assert main(["recipes", "list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(recipes)


def test_a_benchmark_prints_no_boxes_into_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    result = Result(name="one layer", seconds=0.001, value=1.0, unit="of BF16", goal=0.9)
    measured = Measurements(
        benchmark="linear",
        device="a CPU",
        torch="2.13",
        triton=None,
        copy_bandwidth=1e9,
        product_rate=1e9,
        results=(result,),
    )
    fake = bench.Benchmark("measure", "fourbits bench linear", lambda device, args: measured)
    monkeypatch.setitem(bench.BENCHMARKS, "linear", fake)
    assert main(["bench", "linear", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "one layer" in out
    assert not BOX & set(out)


def test_a_terminal_has_boxes():
    out = io.StringIO()
    table = Table("a", title="b")
    table.add_row("c")
    print_table(table, Console(file=out, force_terminal=True, width=40))
    assert BOX & set(out.getvalue())
