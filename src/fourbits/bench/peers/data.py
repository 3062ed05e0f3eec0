"""Measures data preparation by datasets and reading by megatron-core, if installed."""

import itertools
import logging
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers

from fourbits.data.optional import load_datasets


def datasets_map(tokenizer: Path, lines: Path, folder: Path) -> Callable[[], object] | None:
    """Convert JSON lines to tokens on disk with batched `Dataset.map` and the same tokenizer."""
    if not find_spec("datasets"):
        return None
    library, numbers = load_datasets("the benchmark"), itertools.count()
    library.disable_progress_bars()
    inner = tokenizers.Tokenizer.from_file(str(tokenizer))

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = inner.encode_batch(batch["text"], add_special_tokens=False)
        return {"ids": [encoding.ids for encoding in encoded]}

    def run() -> object:
        cache = folder / f"cache{next(numbers)}"
        rows = library.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(cache))
        return rows.map(encode, batched=True, remove_columns=["text"], load_from_cache_file=False)

    return run


def megatron_samples(prefix: Path, seq_len: int, count: int) -> float | None:
    """CPU seconds that megatron-core's GPTDataset takes for `count` samples of a token file."""
    if not find_spec("megatron"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split
    logging.getLogger("megatron").setLevel(logging.ERROR)
    tokenizer: Any = SimpleNamespace(eod=0, pad=0, vocab_size=65_000, unique_identifiers={"class": "none"})
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_len,
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    file = IndexedDataset(str(prefix))
    documents = np.arange(len(file), dtype=np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples: Any = GPTDataset(file, str(prefix), documents, count, Split.train, config)  # pyright: ignore[reportArgumentType]
    samples[0]
    start = time.process_time()
    for number in range(count):
        samples[number]
    return time.process_time() - start
