"""Every file format gives the same documents, and errors name the damaged file."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourbits.data.corpora import open_text, text_files
from fourbits.data.corpora.document import Document
from fourbits.data.corpora.pieces import split_text
from fourbits.data.corpora.sources import ReadOptions, file_sources
from fourbits.data.optional import load_datasets
from fourbits.data.prepare import encode
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.prepare.token_writer import TokenFileWriter
from fourbits.data.stream.token_file import id_type
from fourbits.data.tokenizer import Tokenizer

TEXTS = [f"Text number {number} \u00e9\U0001f600.\n" * (1 + number % 5) for number in range(40)]


def write_jsonl(path: Path, field: str = "text") -> bytes:
    raw = "".join(json.dumps({field: text, "id": 1}) + "\n" for text in TEXTS).encode()
    path.write_bytes(raw)
    return raw


def write_zst(path: Path, raw: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(raw)


def write_parquet(path: Path, field: str = "text") -> None:
    pq.write_table(pa.table({"id": list(range(len(TEXTS))), field: TEXTS}), path, row_group_size=7)


def texts_of(path) -> list[str]:
    [source] = file_sources([str(path)])
    return [document.text for document in source.read()]


@pytest.fixture
def files(tmp_path) -> dict[str, Path]:
    raw = write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    write_zst(tmp_path / "a.jsonl.zst", raw)
    write_parquet(tmp_path / "a.parquet")
    dataset = load_datasets("test").Dataset.from_dict({"text": TEXTS})
    dataset.save_to_disk(tmp_path / "saved")
    return {path.name: path for path in tmp_path.iterdir()}


def test_every_container_gives_the_same_documents(files):
    for name, path in files.items():
        assert texts_of(path) == TEXTS, name


def test_a_hugging_face_dataset_is_streamed_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl")
    [source] = file_sources([f"mine=hf:{tmp_path / 'data'}@train"])
    assert source.name == "mine"
    assert [document.text for document in source.read()] == TEXTS
    with pytest.raises(ValueError, match=r"hf:.*@test: cannot be opened"):
        file_sources([f"hf:{tmp_path / 'data'}@test"])


def test_the_error_names_the_damaged_row_of_a_dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    raw = write_jsonl(tmp_path / "data" / "train.jsonl")
    (tmp_path / "data" / "train.jsonl").write_bytes(raw + b'{"text": "good", \n')
    [source] = file_sources([f"hf:{tmp_path / 'data'}"])
    with pytest.raises(ValueError, match=r"hf:.*data: cannot be read after row \d+: .*JSON parse error"):
        list(source.read())


def test_a_saved_dataset_is_a_folder_of_one_split(tmp_path):
    library = load_datasets("test")
    rows = library.Dataset.from_dict({"text": TEXTS}, info=library.DatasetInfo(license="MIT"))
    library.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved: a dataset with several splits; pass the folder of one"):
        file_sources([str(tmp_path / "saved")])
    [source] = file_sources([str(tmp_path / "saved" / "train")])
    assert (source.licence, [document.text for document in source.read()]) == ("MIT", TEXTS)
    (tmp_path / "saved" / "train" / "dataset_info.json").write_text("{")
    with pytest.raises(ValueError, match="train: cannot be opened"):
        file_sources([str(tmp_path / "saved" / "train")])


def test_a_dataset_that_changes_is_not_read_further(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    (tmp_path / "data").mkdir()
    raw = write_jsonl(tmp_path / "data" / "train.jsonl")
    [source] = file_sources([f"hf:{tmp_path / 'data'}"])
    (tmp_path / "data" / "train.jsonl").write_bytes(2 * raw)
    with pytest.raises(ValueError, match="changed from"):
        list(source.read())


def test_positions_increase_to_the_size_of_the_files(files):
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        [source] = file_sources([str(files[name])])
        positions = [document.position or 0 for document in source.read()]
        assert positions == sorted(positions)
        assert positions[-1] == source.num_bytes, name


def test_names_drop_the_compression_suffix_too(files):
    names = [file_sources([str(files[name])])[0].name for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet")]
    assert names == ["a", "a", "a"]


def test_the_text_can_be_in_another_field(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", "content")
    write_parquet(tmp_path / "b.parquet", "content")
    for name in ("a.jsonl", "b.parquet"):
        [source] = file_sources([str(tmp_path / name)], ReadOptions(text_field="content"))
        assert [document.text for document in source.read()] == TEXTS


def test_a_source_tree_is_read_without_hidden_folders(tmp_path):
    for name in ("src/a.c", "src/b.go", "c.rst", ".git/d.py", "e.o"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    with pytest.warns(UserWarning, match=r"skipped \.o: 1 \(3 bytes\); hidden: 1"):
        assert texts_of(tmp_path) == ["c.rst", "src/a.c", "src/b.go"]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("a.jsonl.gz", lambda raw: raw[: len(raw) // 2], r"a\.jsonl\.gz: damaged or truncated"),
        ("a.jsonl.gz", lambda raw: b"text" + raw, r"a\.jsonl\.gz: damaged or truncated"),
        ("a.jsonl.zst", lambda raw: raw[: len(raw) // 2], r"a\.jsonl\.zst: cannot be read"),
        ("a.jsonl.zst", lambda raw: b"text" + raw, r"a\.jsonl\.zst: cannot be read"),
        ("a.parquet", lambda raw: raw[:-9], r"a\.parquet: not a readable Parquet file"),
        (
            "a.parquet",
            lambda raw: raw[:40] + b"~" * 200 + raw[240:],
            r"a\.parquet: not a readable Parquet file",
        ),
    ],
)
def test_the_error_names_a_damaged_container(files, name, damage, message):
    files[name].write_bytes(damage(files[name].read_bytes()))
    with pytest.raises(ValueError, match=message):
        texts_of(files[name])


def test_the_error_for_a_missing_column_lists_the_columns(tmp_path):
    write_parquet(tmp_path / "b.parquet", "content")
    with pytest.raises(
        ValueError,
        match=r"needs a column 'text' of strings; its columns are id \(int64\), content \(string\)",
    ):
        texts_of(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_every_way_to_store_strings_in_parquet_is_text(tmp_path, kind):
    pq.write_table(
        pa.table({"text": pa.array([*TEXTS, None, " "], pa.string()).cast(kind)}), tmp_path / "a.parquet"
    )
    assert texts_of(tmp_path / "a.parquet") == TEXTS


def test_a_category_of_pandas_is_text(tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"text": pandas.Categorical(TEXTS)}).to_parquet(tmp_path / "a.parquet")
    assert pq.read_schema(tmp_path / "a.parquet").field("text").type != pa.string()
    assert texts_of(tmp_path / "a.parquet") == TEXTS


def test_a_dictionary_of_numbers_is_not_text(tmp_path):
    numbers = pa.array([1, 2]).dictionary_encode()
    pq.write_table(pa.table({"text": numbers}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="needs a column 'text' of strings"):
        texts_of(tmp_path / "a.parquet")


def test_a_text_of_null_is_skipped_alike_in_json_lines_and_parquet(tmp_path):
    texts = [None, "a", None, "", "b", " \n"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    load_datasets("test").Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    for name in ("a.jsonl", "a.parquet", "saved"):
        assert texts_of(tmp_path / name) == ["a", "b"], name
    (tmp_path / "b.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(ValueError, match="the field 'text' must be a string or null, got int"):
        texts_of(tmp_path / "b.jsonl")


@settings(deadline=None)
@given(
    text=st.text(alphabet="ab1 \n.\u00e9", max_size=300), size=st.integers(4, 40), chunk=st.integers(1, 50)
)
def test_pieces_concatenate_to_the_text_whatever_the_chunks(text, size, chunk):
    pieces = list(split_text([text], size))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)
    assert list(split_text((text[i : i + chunk] for i in range(0, len(text), chunk)), size)) == pieces


@pytest.mark.parametrize("end", ["\n", " \n", "\n\n", "\n    \n"])
def test_pieces_encode_to_the_tokens_of_the_whole_text(end):
    """Whatever the lines end in, although trailing spaces are one word and spaces before a word are two."""
    text = "".join(
        f"def f{n}(x):\n    return x * {n} # {'yes' * (n % 3)}{end}value = 1\n" for n in range(400)
    )
    tokenizer = Tokenizer.train([text, *[f"def value{end}"] * 400], 512)
    pieces = list(split_text([text], 100))
    assert len(pieces) > 100
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_a_long_file_is_read_in_pieces_and_is_one_document(tmp_path, monkeypatch):
    text = "".join(f"A line of text, number {number} \u00e9.\n" for number in range(3000))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("Another text, short.\n" * 30)
    sources = file_sources([f"both={tmp_path}"])
    options = PrepareOptions(vocab_size=384, validation_fraction=0.5, seed=1)
    whole = prepare(sources, tmp_path / "whole", options)
    same_tokenizer = PrepareOptions(tokenizer=str(tmp_path / "whole"), validation_fraction=0.5, seed=1)
    monkeypatch.setattr(text_files, "LONG_FILE", 1000)
    monkeypatch.setattr(open_text, "_CHUNK_BYTES", 777)
    monkeypatch.setattr(
        "fourbits.data.corpora.text_files.split_text", lambda chunks: split_text(chunks, 5000)
    )
    assert sum(document.more for document in sources[0].read()) > 10
    pieces = prepare(sources, tmp_path / "pieces", same_tokenizer)
    for files, expected in ((pieces.train, whole.train), (pieces.validation, whole.validation)):
        assert files["both"].tokens.tolist() == expected["both"].tokens.tolist()
        assert files["both"].lengths.tolist() == expected["both"].lengths.tolist()


def test_a_long_text_encodes_in_pieces_to_the_tokens_of_the_whole(tmp_path, monkeypatch):
    text = "".join(f"A line of text, number {number}.\n" for number in range(3000))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{n}\n{text}"}) + "\n" for n in range(4)))
    whole = prepare(
        file_sources([str(tmp_path / "a.jsonl")]), tmp_path / "whole", PrepareOptions(vocab_size=384)
    )
    sizes: list[int] = []
    monkeypatch.setattr(encode, "PIECE", 5000)
    monkeypatch.setattr(
        encode, "split_text", lambda texts: [sizes.append(len(p)) or p for p in split_text(texts, 5000)]
    )
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 20_000)
    calls: list[int] = []
    encode_batch = Tokenizer.encode_batch

    def counted(self, texts):
        calls.append(sum(map(len, texts)))
        return encode_batch(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    same_tokenizer = PrepareOptions(tokenizer=str(tmp_path / "whole"))
    pieces = prepare(file_sources([str(tmp_path / "a.jsonl")]), tmp_path / "pieces", same_tokenizer)
    assert len(sizes) > 40
    assert max(sizes) <= 5000
    assert max(calls) < 20_000 + 5000
    assert pieces.train["a"].tokens.tolist() == whole.train["a"].tokens.tolist()


def test_at_most_two_long_texts_are_in_memory(monkeypatch):
    monkeypatch.setattr(encode, "_MAX_WAITING", 1000)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 100)
    begun, most, tokenizer = 0, 0, Tokenizer.train(TEXTS, 384)

    def read(size: int, count: int):
        nonlocal begun
        for number in range(count):
            begun += 1
            yield Document(str(number), "a text " * (size // 7 + 1), "")

    for size, expected in ((1000, 2), (120, 3)):
        begun, done, most = 0, 0, 0
        for batch in encode.encode_ahead(read(size, 12), tokenizer, id_type(384)):
            most = max(most, begun - done)
            done += len(batch)
        assert (most, done) == (expected, 12)


def tokenizer_and_tokens(folder: Path) -> tuple[Tokenizer, list[list[int]]]:
    tokenizer = Tokenizer.train(TEXTS, 384)
    tokenizer.save(folder / "tokenizer.json")
    return tokenizer, [[*tokenizer.encode(text), tokenizer.end_id] for text in TEXTS]


def test_a_megatron_token_file_is_split_but_not_encoded_again(tmp_path):
    _, documents = tokenizer_and_tokens(tmp_path)
    with TokenFileWriter(tmp_path / "theirs", id_type(384)) as writer:
        for document in documents:
            writer.add(document)
    options = PrepareOptions(tokenizer=str(tmp_path), validation_fraction=0.2)
    data = prepare(file_sources([str(tmp_path / "theirs.idx")]), tmp_path / "out", options)
    found = [
        file.document(number).tolist()
        for file in (data.train["theirs"], data.validation["theirs"])
        for number in range(file.num_documents)
    ]
    assert sorted(found) == sorted(documents)
    with pytest.raises(ValueError, match="'theirs' is a token file; pass its tokenizer"):
        prepare(file_sources([str(tmp_path / "theirs.bin")]), tmp_path / "other", PrepareOptions())


def test_the_error_names_a_token_outside_the_vocabulary_and_its_position(tmp_path):
    _, documents = tokenizer_and_tokens(tmp_path)
    with TokenFileWriter(tmp_path / "theirs", id_type(1000)) as writer:
        for document in [*documents, [1, 2, 999, 0]]:
            writer.add(document)
    options = PrepareOptions(tokenizer=str(tmp_path))
    with pytest.raises(ValueError, match="theirs:40: token 999 at position 2 is outside the vocabulary"):
        prepare(file_sources([str(tmp_path / "theirs.idx")]), tmp_path / "out", options)
    assert not list((tmp_path / "out").glob("*.bin"))


def test_the_error_names_tokens_of_an_unsupported_type(tmp_path):
    np.arange(10, dtype=np.float64).tofile(tmp_path / "x.bin")
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([6])  # 6: float64
    (tmp_path / "x.idx").write_bytes(header + bytes(16) + bytes(40))
    with pytest.raises(
        ValueError, match=r"x\.idx: tokens must be uint16 \(code 8\) or int32 \(code 4\), got code 6"
    ):
        file_sources([str(tmp_path / "x.idx")])
