"""Speed of preparing text and reading tokens, relative to bare tokenizer, disk and other projects.

The text is the standard library's code, in every container. Preparation rates are relative to `encode_batch`
on the same texts in memory, timed alternately. Tokens are read in random order, as in a run, on one core: CPU
time if the file is in memory, wall time if it has to come from disk. datasets and megatron-core are measured
if installed.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fourbits.bench.data_files import SEQ_LEN, evict, sparse_index, text_files, token_file
from fourbits.bench.peers.data import datasets_map, megatron_samples
from fourbits.bench.timing import Measurements, Result, copy_bandwidth, measured, product_rate
from fourbits.data.corpora.sources import file_sources
from fourbits.data.prepare.encode import batches
from fourbits.data.prepare.prepare import PrepareOptions, prepare
from fourbits.data.stream.blend import Phase
from fourbits.data.stream.stream import PhasedStream
from fourbits.data.stream.token_file import TokenFile
from fourbits.data.tokenizer import Tokenizer

_REPEATS = 3
_VOCABULARY = 8192
_BATCH = 8
_WARM_BATCHES, _COLD_BATCHES, _STEP_BATCHES = 400, 24, 50
#: best rate of `30m` in BF16 on an H100, and samples and length of one of its steps
_TOKENS_PER_SECOND, _STEP = 1.2e6, (128, 512)


def bench_data(device: torch.device) -> Measurements:
    """Measure preparation and reading; the device is only reported."""
    with tempfile.TemporaryDirectory(prefix="fourbits-bench-") as folder:
        results = (*_prepare_results(Path(folder)), *_read_results(Path(folder)))
    return measured("data", device, results, (copy_bandwidth(device), product_rate(device)))


def _prepare_results(folder: Path) -> list[Result]:
    texts, containers = text_files(folder)
    num_bytes = sum(len(text.encode()) for text in texts)
    tokenizer = Tokenizer.train(texts, _VOCABULARY)
    tokenizer.save(folder / "tokenizer.json")
    options = PrepareOptions(tokenizer=str(folder))
    numbers = itertools.count()

    def prepared(path: Path) -> Callable[[], object]:
        return lambda: prepare(file_sources([f"x={path}"]), folder / f"out{next(numbers)}", options)

    runs = {"bare": _bare(tokenizer, containers["jsonl"])}
    runs |= {kind: prepared(path) for kind, path in containers.items()}
    peer = datasets_map(folder / "tokenizer.json", containers["jsonl"], folder)
    if peer:
        runs["datasets map"] = peer
    seconds = _in_turns(runs)
    bare, theirs = seconds.pop("bare"), seconds.pop("datasets map", None)
    results = [Result(name="bare encode_batch", seconds=bare, value=num_bytes / bare / 1e6, unit="MB/s")]
    for kind, own in seconds.items():
        goal = 0.75 if kind in ("text", "jsonl") else None
        value = bare / own
        results.append(
            Result(name=f"prepare {kind}", seconds=own, value=value, unit="of encode_batch", goal=goal)
        )
    if theirs:
        own = seconds["jsonl"]
        results.append(Result(name="prepare jsonl", seconds=own, value=theirs / own, unit="of datasets' map"))
    return results


def _bare(tokenizer: Tokenizer, lines: Path) -> Callable[[], object]:
    """encode_batch on texts in memory, in the batches of `prepare`."""
    [source] = file_sources([str(lines)])
    in_memory = [[document.text for document in batch] for batch in batches(source.read())]
    return lambda: [tokenizer.encode_bare(batch) for batch in in_memory]


def _in_turns(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_REPEATS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def _read_results(folder: Path) -> list[Result]:
    prefix = token_file(folder, _VOCABULARY)
    warm = _warm_seconds(prefix)
    tokens = _WARM_BATCHES * _BATCH * SEQ_LEN
    results = [
        Result(
            name="read from memory, one core",
            seconds=warm,
            value=tokens / warm / 1e6,
            unit="M tokens/s",
            goal=50,
        ),
        _cold_result(prefix),
        _first_batch_result(folder),
        _step_result(prefix),
    ]
    theirs = megatron_samples(prefix, SEQ_LEN, _WARM_BATCHES * _BATCH)
    if theirs:
        results.append(
            Result(
                name="read from memory",
                seconds=warm,
                value=theirs / warm,
                unit="of megatron-core's GPTDataset",
            )
        )
    return results


def _stream(prefix: Path, seq_len: int = SEQ_LEN, batch_size: int = _BATCH) -> PhasedStream:
    file = TokenFile(prefix)
    phases = [Phase(until=1.0, weights={"x": 1.0})]
    return PhasedStream(
        {"x": file},
        phases,
        total_samples=file.num_tokens // seq_len,
        seq_len=seq_len,
        seed=1,
        batch_size=batch_size,
        vocab_size=_VOCABULARY,
    )


def _warm_seconds(prefix: Path) -> float:
    stream, times = _stream(prefix), list[float]()
    int(stream.windows[0].file.tokens.max())  # into memory
    for _ in range(_REPEATS):
        start = time.process_time()
        for number in range(_WARM_BATCHES):
            stream.batch(number * _BATCH, _BATCH)
        times.append(time.process_time() - start)
    return statistics.median(times)


def _cold_result(prefix: Path) -> Result:
    """Batches from a file on disk; the ceiling is the rate of plain reads at the same offsets."""
    path, count = prefix.with_name(f"{prefix.name}.bin"), _COLD_BATCHES * _BATCH
    evicted = evict(path)
    start = time.perf_counter()
    stream = _stream(prefix)
    for number in range(_COLD_BATCHES):
        stream.batch(number * _BATCH, _BATCH)
    seconds = time.perf_counter() - start
    size = 2 * (SEQ_LEN + 1)
    _, places = stream.locate(torch.arange(count, dtype=torch.int64, device="cpu").numpy())
    del stream
    evict(path)
    with path.open("rb", buffering=0) as file:
        start = time.perf_counter()
        for place in places.tolist():
            file.seek(2 * place)
            file.read(size)
        own = time.perf_counter() - start
    rate, ceiling = (count * SEQ_LEN / spent / 1e6 for spent in (seconds, own))
    name = "read from disk" if evicted else "read from disk or its cache, which this system does not drop"
    return Result(name=name, seconds=seconds, value=rate, unit="M tokens/s", ceiling=ceiling)


def _first_batch_result(folder: Path) -> Result:
    prefix = sparse_index(folder, documents=1_000_000, length=1000)
    start = time.perf_counter()
    _stream(prefix).batch(0, _BATCH)
    seconds = time.perf_counter() - start
    name = "first batch of 1e9 tokens, 1e6 documents"
    return Result(name=name, seconds=seconds, value=1 / seconds, unit="of the 1 s allowed", goal=1)


def _step_result(prefix: Path) -> Result:
    samples, seq_len = _STEP
    stream, times = _stream(prefix, seq_len, samples), list[float]()
    for number in range(_STEP_BATCHES):
        start = time.perf_counter()
        stream.batch(number * samples, samples)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    step = samples * seq_len / _TOKENS_PER_SECOND
    name = f"batch of a step at {_TOKENS_PER_SECOND / 1e6:g}M tokens/s"
    return Result(name=name, seconds=seconds, value=step / seconds, unit="times as fast as the step", goal=1)
