"""Token files are compatible with megatron-core: it reads ours, and we read what it writes."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fourbits.data.prepare.token_writer import TokenFileWriter
from fourbits.data.stream.token_file import TokenFile, id_type

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 65_000]]

# In a separate process: importing megatron-core warns about optional packages.
PROGRAM = """
import json, sys
import numpy, torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
folder, vocabulary, documents = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ours = IndexedDataset(folder + "/ours")
builder = IndexedDatasetBuilder(folder + "/theirs.bin", dtype=DType.optimal_dtype(vocabulary))
for number, document in enumerate(documents):
    builder.add_item(torch.tensor(document))
    if number != 1:  # the second and the third sequence are one document
        builder.end_document()
builder.finalize(folder + "/theirs.idx")
print(json.dumps({
    "sequences": [ours[i].tolist() for i in range(len(ours))],
    "documents": ours.document_indices.tolist(),
    "lengths": ours.sequence_lengths.tolist(),
    "dtype": str(numpy.dtype(ours.index.dtype)),
    "part": ours.get(2, offset=1, length=2).tolist(),
}))
"""


@pytest.mark.parametrize("vocabulary", [65_499, 131_072])
def test_megatron_core_reads_and_writes_the_same_files(tmp_path, vocabulary):
    with TokenFileWriter(tmp_path / "ours", id_type(vocabulary)) as writer:
        for document in DOCUMENTS:
            writer.add(document)
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path), str(vocabulary), json.dumps(DOCUMENTS)]
    seen = json.loads(
        subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    assert seen["sequences"] == DOCUMENTS
    assert seen["documents"] == [0, 1, 2, 3, 4]
    assert seen["lengths"] == [3, 1, 4, 2]
    assert np.dtype(seen["dtype"]) == id_type(vocabulary)
    assert seen["part"] == [6, 7]

    theirs = TokenFile(tmp_path / "theirs")
    assert theirs.dtype == id_type(vocabulary)
    assert [theirs.document(number).tolist() for number in range(3)] == [
        [1, 2, 3],
        [4, 5, 6, 7, 8],
        [9, 65_000],
    ]
    assert (tmp_path / "theirs.bin").read_bytes() == (tmp_path / "ours.bin").read_bytes()
