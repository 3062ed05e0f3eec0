"""Converts a tekken.json, the rank-based BPE that mistral-common ships, to a `tokenizers` tokenizer.

The file lists byte strings in the order of training, and a pattern that splits text into words. Tokens below
`default_num_special_tokens` are special; the string of rank r is token r after them. Ranks determine merges:
the merge for a string joins the two parts that remain when it is encoded with the lower ranks only.
"""

import base64
import json
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

#: the special tokens whose names the format fixes; </s> ends a document
_SPECIAL = ("<unk>", "<s>", "</s>")
TEKKEN = "tekken"
_FILE = "data/tekken_240911.json"


def shipped_tekken() -> Path:
    """The file in the installed mistral-common, which is not imported. Raises ValueError without it."""
    spec = find_spec("mistral_common")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _FILE).is_file():
            return path
    raise ValueError(
        "tokenizer: tekken is part of the package mistral-common, which is not installed: "
        "pip install --no-deps mistral-common."
    )


def is_tekken(path: Path) -> bool:
    """Whether a file starts like a tekken.json; a tokenizer.json starts with its version."""
    with path.open("rb") as file:
        return b'"default_num_special_tokens"' in file.read(4096)


def load_tekken(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a tekken.json. Raises ValueError for a damaged file."""
    stat = path.stat()
    return tokenizers.Tokenizer.from_str(_converted(path, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=2)
def _converted(path: Path, size: int, modified: int) -> str:
    """The converted JSON, cached because finding the merges takes seconds; a changed file is a new key."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = content["config"]
        num_special = int(config["default_num_special_tokens"])
        num_ranked = int(config["default_vocab_size"]) - num_special
        strings = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"][:num_ranked]]
        ranks = {string: rank for rank, string in enumerate(strings)}
        return _tokenizer(ranks, num_special, config["pattern"]).to_str()
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a tekken.json: {type(error).__name__}: {error}.") from error


def _tokenizer(ranks: dict[bytes, int], num_special: int, pattern: str) -> tokenizers.Tokenizer:
    special = [*_SPECIAL, *(f"<SPECIAL_{number}>" for number in range(len(_SPECIAL), num_special))]
    letters = _letters()

    def spelled(string: bytes) -> str:
        return "".join(letters[byte] for byte in string)

    vocabulary = {name: number for number, name in enumerate(special)}
    vocabulary.update({spelled(string): rank + num_special for string, rank in ranks.items()})
    merges = [tuple(map(spelled, _parts(string, ranks))) for string in ranks if len(string) > 1]
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, fuse_unk=False))  # pyright: ignore[reportArgumentType]
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    into_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, into_bytes])  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return inner


def _parts(string: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that remain after all merges of lower rank. Raises ValueError if more remain."""
    parts = [string[i : i + 1] for i in range(len(string))]
    rank = ranks[string]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        best = min(pairs)
        if best == rank:
            raise ValueError(f"no two strings of lower rank form {string!r}")
        i = pairs.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _letters() -> list[str]:
    """The visible character that represents each byte: itself if visible, else one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]
