"""Documents: a fixed order, and errors that name the bad file and the position in it."""

import ast

import pytest

from fourbits.data.config import text_sources
from fourbits.data.corpora.sources import file_sources
from fourbits.data.corpora.stdlib import stdlib_sources


def texts(source):
    return [document.text for document in source.read()]


def test_a_folder_is_one_source_read_in_path_order(tmp_path):
    for name, text in [
        ("b.txt", "two"),
        ("a/z.md", "one"),
        ("c.jsonl", '{"text": "three"}\n\n{"text": "four"}\n'),
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    (tmp_path / "empty.py").write_text("")
    with pytest.warns(UserWarning, match=r"skipped \.bin: 1 \(1 bytes\)"):
        [source] = file_sources([str(tmp_path)])
    assert source.name == tmp_path.name
    assert [(d.name, d.text) for d in source.read()] == [
        ("a/z.md", "one"),
        ("b.txt", "two"),
        ("c.jsonl:1", "three"),
        ("c.jsonl:3", "four"),
    ]
    assert texts(source) == ["one", "two", "three", "four"]  # each read() starts at the beginning


def test_a_path_may_be_given_a_name(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    assert [s.name for s in text_sources([str(tmp_path / "x.txt"), f"y={tmp_path / 'x.txt'}"])] == ["x", "y"]
    with pytest.raises(ValueError, match="two sources are called 'x'"):
        text_sources([str(tmp_path / "x.txt"), f"x={tmp_path}"])


def test_equal_texts_share_a_split_key_wherever_they_are(tmp_path):
    (tmp_path / "a.txt").write_text("same")
    (tmp_path / "b.txt").write_text("same")
    [source] = file_sources([str(tmp_path)])
    assert len({document.split_key for document in source.read()}) == 1


def test_a_changed_file_changes_the_fingerprint(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    before = file_sources([str(tmp_path)])[0].fingerprint()
    assert file_sources([str(tmp_path)])[0].fingerprint() == before
    (tmp_path / "a.txt").write_text("other text")
    assert file_sources([str(tmp_path)])[0].fingerprint() != before


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("a.txt", b"good\xffbad", "a.txt: not UTF-8: byte 0xff at offset 4"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', "a.jsonl: not UTF-8: byte 0xe9 at offset 24"),
        ("a.jsonl", b'{"text": "x"}\n{"text" "y"}\n', "a.jsonl:2: not JSON: .* at column 9"),
        (
            "a.jsonl",
            b'{"content": "x"}\n',
            "a.jsonl:1: each line must be an object with a string field 'text'",
        ),
        ("a.jsonl", b'["x"]\n', "a.jsonl:1: each line must be an object"),
        (
            "a.jsonl",
            b'{"text": "ab\\ud800"}\n',
            "a.jsonl:1: character 2 of the text is a lone surrogate",
        ),
    ],
)
def test_the_error_names_a_bad_file_and_the_position(tmp_path, name, raw, message):
    (tmp_path / name).write_bytes(raw)
    [source] = file_sources([str(tmp_path / name)])
    with pytest.raises(ValueError, match=message):
        texts(source)


def test_the_error_names_a_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    [source] = file_sources([str(tmp_path / "a.txt")])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ValueError, match=r"a\.txt: cannot be read: No such file"):
        texts(source)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "cannot be opened: No such file or directory"),
        ("empty.txt", "the file is empty"),
        ("picture.png", r"the file type must be .txt, .md, source code, .jsonl, .* got '.png'"),
        ("nothing", r"this folder has no text files. Supported: .txt, .md,"),
        ("hollow", "every text file in this folder is empty"),
    ],
)
def test_a_path_without_text_is_rejected_at_once(tmp_path, path, message):
    for folder in ("nothing", "hollow"):
        (tmp_path / folder).mkdir()
    for file in ("empty.txt", "hollow/a.md"):
        (tmp_path / file).touch()
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(ValueError, match=message):
        file_sources([str(tmp_path / path)])


def test_the_standard_library_is_code_and_prose():
    code, prose = stdlib_sources()
    modules = {document.name: document for document in code.read()}
    assert "argparse.py" in modules
    assert not any("test" in name.split("/") for name in modules)
    notes = {document.name: document for document in prose.read()}
    docstring = ast.get_docstring(ast.parse(modules["argparse.py"].text)) or ""
    assert notes["docstrings of argparse.py"].text.startswith(docstring)
    assert notes["docstrings of argparse.py"].split_key == modules["argparse.py"].split_key
    assert sum(len(document.text) for document in modules.values()) > 5_000_000
    assert sum(len(document.text) for document in notes.values()) > 1_000_000
