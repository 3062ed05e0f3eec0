"""`fourbits data`: text in, a prepared folder out, and equal content in tables and in JSON."""

import json

import pytest

from fourbits.cli.commands import load
from fourbits.cli.data import reading_lines
from fourbits.cli.parser import parse
from fourbits.data.stream.dataset import PreparedData


def run(*argv) -> int:
    command = load("data")
    return command.run(parse("data", command, [str(argument) for argument in argv]))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"Text number {number} of forty.\n" * 5)
    return folder


def test_prepare_writes_a_folder_and_prints_its_contents(texts, tmp_path, capsys):
    assert run("prepare", f"letters={texts}", "--out", tmp_path / "out", "--vocab-size", 384) == 0
    prepared = PreparedData.open(tmp_path / "out", verify=True)
    printed = capsys.readouterr()
    assert "letters" in printed.out
    assert f"{prepared.train['letters'].num_tokens:,}" in printed.out
    assert prepared.tokenizer.sha256[:16] in printed.out
    assert "letters: read 0.0 MB of files" in printed.err


def test_inspect_json_contains_the_manifest(texts, tmp_path, capsys):
    run("prepare", texts, "--out", tmp_path / "out", "--vocab-size", 384, "--json")
    first = json.loads(capsys.readouterr().out)
    run("inspect", tmp_path / "out", "--verify", "--json")
    found = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in first} == first
    assert found["lengths"]["train"]["texts"]["1"] >= found["lengths"]["train"]["texts"]["0"] > 0
    assert first["sources"]["texts"]["documents"] == 40


def test_the_standard_library_becomes_a_corpus_that_can_be_prepared(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    (tmp_path / "lib" / "tests").mkdir(parents=True)
    (tmp_path / "lib" / "tests" / "excluded.py").write_text("x = 1\n" * 100)
    for number in range(30):
        module = f'"""{f"Module number {number} of a small library. " * 5}"""\n\nVALUE = {number}\n'
        (tmp_path / "lib" / f"module{number}.py").write_text(module)
    assert run("corpus", "stdlib", "--out", tmp_path / "corpus") == 0
    assert "code: 30 documents" in capsys.readouterr().out
    run("prepare", tmp_path / "corpus", "--out", tmp_path / "from-corpus", "--vocab-size", 384)
    run("prepare", "stdlib", "--out", tmp_path / "direct", "--vocab-size", 384)
    one, two = PreparedData.open(tmp_path / "from-corpus"), PreparedData.open(tmp_path / "direct")
    assert set(one.train) == {"code", "prose"}
    for name in one.train:
        assert one.train[name].tokens.tolist() == two.train[name].tokens.tolist()
        assert one.validation[name].tokens.tolist() == two.validation[name].tokens.tolist()


def test_options_of_the_other_corpus_are_rejected(tmp_path):
    for options in (("--max-mb", 3), ("--debs", tmp_path)):
        with pytest.raises(ValueError, match="--debs and --max-mb apply to debian only"):
            run("corpus", "stdlib", "--out", tmp_path / "corpus", *options)
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("limit", ["nan", "inf", "-inf"])
def test_a_limit_that_is_not_finite_is_rejected(tmp_path, limit, capsys):
    with pytest.raises(SystemExit):
        run("corpus", "debian", "--out", tmp_path / "corpus", f"--max-mb={limit}")
    assert f"--max-mb: must be a finite number, got '{limit}'. Pass one" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_a_limit_that_is_no_size_is_rejected(tmp_path, limit):
    with pytest.raises(ValueError, match="must be a number above 0, in MB of text"):
        run("corpus", "debian", "--out", tmp_path / "corpus", f"--max-mb={limit}")
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("prepare", "", "--out", "x"),
        ("prepare", "stdlib", "--out", ""),
        ("prepare", "stdlib", "--out="),
        ("prepare", "stdlib", "--out", "x", "--tokenizer", ""),
        ("prepare", "stdlib", "--out", "x", "--licence", ""),
        ("inspect", ""),
        ("corpus", "stdlib", "--out", ""),
        ("corpus", "debian", "--out", "x", "--debs", ""),
    ],
)
def test_an_empty_argument_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys, words):
    """As of a variable that is not set: an empty path would be the working directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        run(*words)
    assert stop.value.code == 2
    assert "is empty, as from a variable that is not set" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_was_skipped_and_lost_is_printed(texts, tmp_path, capsys):
    (texts / "picture.png").write_bytes(b"1234")
    with pytest.warns(UserWarning, match="skipped"):
        run("prepare", texts, "--out", tmp_path / "out", "--vocab-size", 384)
    assert "texts: skipped .png: 1 (4 bytes)" in capsys.readouterr().out
    lines = reading_lines({"sampled_characters": 1000, "lost_characters": 5, "unencodable_documents": 2})
    assert lines == [
        "the tokenizer loses 0.50% of the characters, in a sample",
        "2 documents without any token dropped",
    ]


def test_packages_that_could_not_be_downloaded_are_reported(tmp_path, capsys, monkeypatch):
    corpus = {"sources": {"code": {"documents": 1, "bytes": 2}}, "missing_packages": ["one", "two"]}
    monkeypatch.setattr("fourbits.cli.data.build_debian", lambda *args, **options: corpus)
    assert run("corpus", "debian", "--out", tmp_path) == 0
    assert capsys.readouterr().err == "packages that could not be downloaded, skipped: one, two\n"


def test_an_action_is_required(capsys):
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 2
    assert "prepare|inspect|corpus" in capsys.readouterr().err


def test_inspect_shows_the_plan_of_a_run_and_where_a_step_reads(texts, tmp_path, capsys):
    run("prepare", texts, "--out", tmp_path / "out", "--vocab-size", 384)
    config = tmp_path / "run.yaml"
    config.write_text("model: tiny\ntrain: {steps: 10, micro_batch_size: 2, seq_len: 16}\n")
    capsys.readouterr()
    run("inspect", tmp_path / "out", "--run", config, "--step", 3, "--sample", 7, "--duplicates", "--json")
    found = json.loads(capsys.readouterr().out)
    [phase] = found["plan"]
    assert (phase["first_step"], phase["end_step"], phase["sources"]["texts"]["tokens"]) == (0, 10, 320)
    assert [row["sample"] for row in found["step"]] == [6, 7]
    data = PreparedData.open(tmp_path / "out")
    ids = data.train["texts"].tokens[found["sample"]["begin"] : found["sample"]["end"]].tolist()
    text = found["sample"]["text"].replace(f"\n{data.tokenizer.end_token}\n", "")
    assert text == data.tokenizer.decode(ids)
    assert found["duplicates"]["train"]["texts"]["documents"] == 0
    run("inspect", tmp_path / "out", "--run", config, "--step", 3, "--document", "texts:0")
    printed = capsys.readouterr().out
    assert "what the run reads" in printed
    assert "sample 6: texts tokens" in printed
    assert data.tokenizer.decode(data.train["texts"].document(0).tolist()).splitlines()[0] in printed


def test_inspect_of_a_run_folder_shows_its_losses_by_source(texts, tmp_path, capsys):
    run("prepare", texts, "--out", tmp_path / "out", "--vocab-size", 384)
    folder = tmp_path / "run"
    folder.mkdir()
    folder.joinpath("config.yaml").write_text(
        "model: tiny\ntrain: {steps: 10, micro_batch_size: 2, seq_len: 16}\n"
    )
    folder.joinpath("manifest.json").write_text(json.dumps({"data": {"folder": str(tmp_path / "out")}}))
    record = {"kind": "validation", "step": 5, "val_loss": 3.5, "val_texts": 3.25}
    folder.joinpath("metrics.jsonl").write_text('{"kind": "train", "step": 4}\n' + json.dumps(record) + "\n")
    capsys.readouterr()
    run("inspect", folder)
    printed = capsys.readouterr().out
    assert "3.2500" in printed
    assert "what the run reads" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", "1"], "pass one with --run"),
        (["--document", "other:1"], "with a source of texts"),
        (["--document", "texts:99"], r"--document texts:99: must be in 0 to \d+, the training documents of"),
        (["--document", "texts:\u00b2"], "must be SOURCE:N"),
        (["--run", "tiny", "--step", "245"], "must be in 0 to 244, the steps of the run"),
        (["--run", "tiny", "--sample", "490"], "--sample 490: must be in 0 to 489, the samples of the run"),
        (["--run", "tiny", "--sample", "-1"], "--sample -1: must be in 0 to 489"),
    ],
)
def test_inspect_rejects_steps_and_documents_that_do_not_exist(texts, tmp_path, options, message):
    run("prepare", texts, "--out", tmp_path / "out", "--vocab-size", 384)
    config = tmp_path / "run.yaml"
    config.write_text("model: tiny\ntrain: {steps: 245, micro_batch_size: 2, seq_len: 16}\n")
    options = [str(config) if option == "tiny" else option for option in options]
    with pytest.raises(ValueError, match=message):
        run("inspect", tmp_path / "out", *options)


def test_licences_are_recorded_for_one_or_all_sources(texts, tmp_path):
    (tmp_path / "b.txt").write_text("Another text. " * 50)
    options = ["--out", tmp_path / "out", "--vocab-size", 384, "--license", "MIT", "--licence", "b=CC0-1.0"]
    run("prepare", texts, tmp_path / "b.txt", *options)
    records = PreparedData.open(tmp_path / "out").manifest["sources"]
    assert (records["texts"]["licence"], records["b"]["licence"]) == ("MIT", "CC0-1.0")
    with pytest.raises(ValueError, match=r"no source is called 'text'\. Did you mean 'texts'"):
        run("prepare", texts, "--out", tmp_path / "other", "--licence", "text=MIT")
