"""`fourbits data`: text in, a prepared folder out, and the same answer for people and for programs."""

import json

import pytest

from fourbits.cli.commands import load
from fourbits.cli.parser import parse
from fourbits.data.dataset import PreparedData


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


def test_prepare_writes_a_folder_and_says_what_is_in_it(texts, tmp_path, capsys):
    assert run("prepare", f"letters={texts}", "--out", tmp_path / "out", "--vocab-size", 384) == 0
    prepared = PreparedData.open(tmp_path / "out", verify=True)
    printed = capsys.readouterr()
    assert "letters" in printed.out
    assert f"{prepared.train['letters'].num_tokens:,}" in printed.out
    assert prepared.tokenizer.sha256[:16] in printed.out
    assert "letters: 0.0 MB" in printed.err


def test_inspect_prints_the_manifest_for_programs(texts, tmp_path, capsys):
    run("prepare", texts, "--out", tmp_path / "out", "--vocab-size", 384, "--json")
    first = json.loads(capsys.readouterr().out)
    run("inspect", tmp_path / "out", "--verify", "--json")
    assert json.loads(capsys.readouterr().out) == first
    assert first["sources"]["texts"]["documents"] == 40


def test_the_standard_library_becomes_a_corpus_that_can_be_prepared(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    (tmp_path / "lib" / "tests").mkdir(parents=True)
    (tmp_path / "lib" / "tests" / "left_out.py").write_text("x = 1\n" * 100)
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


def test_an_action_is_required(capsys):
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 2
    assert "prepare|inspect|corpus" in capsys.readouterr().err
