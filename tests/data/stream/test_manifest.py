"""A manifest that was edited or damaged is named by its file and key, and leads to no file elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fourbits.data.config import DataConfig, open_data, text_sources
from fourbits.data.corpora.sources import file_sources
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.stream.dataset import PreparedData
from fourbits.data.stream.manifest import MANIFEST


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text("Some text of the source.\n" * 50)
    return prepare(
        file_sources([str(tmp_path / "a.txt")]), tmp_path / "out", PrepareOptions(vocab_size=384)
    ).folder


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "place",
    [
        "tokenizer.sha256",
        "tokenizer.end_token",
        "tokenizer.end_id",
        "sources.a.train",
        "sources.a.validation.tokens",
        "sources.a.train.bin",
        "sources.a.train.idx.sha256",
        "sources.a.train.bin.sampled_sha256",
        "sources.a.validation.bin.bytes",
        "sources.a.text_bytes",
        "sources.a.licence",
    ],
)
@pytest.mark.parametrize("verify", [False, True])
def test_the_error_names_the_key_that_is_missing_or_wrong(folder, place, verify):
    *parents, key = place.split(".")

    def parent(manifest: dict) -> dict:
        for name in parents:
            manifest = manifest[name]
        return manifest

    edit(folder, lambda manifest: parent(manifest).update({key: [1.5]}))
    with pytest.raises(ValueError, match=rf"manifest\.json: damaged: '{place}' must be .*, got \[1\.5\]"):
        PreparedData.open(folder, verify=verify)
    edit(folder, lambda manifest: parent(manifest).pop(key))
    with pytest.raises(ValueError, match=rf"manifest\.json: damaged: '{place}' is missing; prepare the data"):
        PreparedData.open(folder, verify=verify)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "b/../../a", "..", ".", "", "a\x00", "a\nb"])
def test_a_source_of_another_folder_is_not_opened(folder, name, monkeypatch):
    edit(folder, lambda manifest: manifest["sources"].update({name: manifest["sources"].pop("a")}))
    opened: list[Path] = []
    monkeypatch.setattr(
        "fourbits.data.stream.dataset.check_files", lambda path, *_, **__: opened.append(path)
    )
    with pytest.raises(ValueError, match="cannot be the name of a source in this folder"):
        PreparedData.open(folder)
    assert opened == []


def test_a_manifest_without_sources_is_damaged(folder):
    edit(folder, lambda manifest: manifest["sources"].clear())
    with pytest.raises(ValueError, match=r"manifest\.json: damaged: 'sources' is empty; prepare the data"):
        PreparedData.open(folder)


@pytest.mark.parametrize("key", ["documents", "tokens"])
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("change", [-1_000_000, 1])
def test_counts_of_a_manifest_that_its_token_files_do_not_have_are_named(folder, split, key, change):
    def shift(manifest: dict) -> None:
        manifest["sources"]["a"][split][key] += change

    edit(folder, shift)
    with pytest.raises(ValueError, match=rf"damaged: 'sources\.a\.{split}\.{key}' is -?\d+, the token file"):
        PreparedData.open(folder)


def test_a_manifest_that_other_software_wrote_does_not_hide_a_text_folder(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("Some text of the source.\n" * 50)
    (tmp_path / "text" / MANIFEST).write_text('{"name": "an extension"}')
    with pytest.warns(UserWarning, match=r"\.json without a field 'text': 1"):
        data = open_data(DataConfig(paths=(str(tmp_path / "text"),), vocab_size=384), tmp_path / "cache")
    assert data.manifest["sources"]["text"]["documents"] == 1


def test_a_damaged_manifest_is_not_taken_for_a_text_folder(folder):
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json: damaged"):
        open_data(DataConfig(paths=(str(folder),)), folder / "cache")


def test_prepared_data_are_not_read_as_text(folder):
    with pytest.raises(ValueError, match="holds prepared data, which is read alone and as it is"):
        text_sources([str(folder)])


def test_a_record_of_a_finished_source_that_was_edited_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("Some text of the source.\n" * 50)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.finished.json").write_text('{"key": 1}')
    with pytest.raises(ValueError, match=r"a\.finished\.json: damaged: 'key' must be text, got 1; delete it"):
        prepare(file_sources([str(tmp_path / "a.txt")]), tmp_path / "out", PrepareOptions(vocab_size=384))
