"""Text to tokens and back: byte-level BPE, trained here or read from a tokenizer.json.

Every text can be encoded, because the alphabet is the 256 bytes. One special token ends a document; no text
encodes to it, not even text that spells it. A tokenizer is data: reading one executes no code.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fourbits.data.optional import load_transformers
from fourbits.data.tekken import TEKKEN, is_tekken, load_tekken, shipped_tekken
from fourbits.data.whole_file import write_whole

END_TOKEN = "<|endoftext|>"
KNOWN_END_TOKENS = (END_TOKEN, "</s>", "<|end_of_text|>", "<eos>", "<|eot|>", "[EOS]")
KNOWN_PAD_TOKENS = ("<pad>", "<|pad|>", "<|padding|>", "[PAD]", "<|finetune_right_pad_id|>")
VOCABULARY_MULTIPLE = 128  # whole blocks, tiles and tensor-core shapes in the embedding
SMALLEST_VOCABULARY = 384
_HUB_NAME = re.compile(r"[\w-]+/[\w.-]+(?<!\.json)")  # OWNER/NAME


def padded_size(size: int) -> int:
    """The model's vocabulary size for `size` tokens: the next multiple of 128."""
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


class Tokenizer:
    """A tokenizer with its end-of-document token.

    size: number of tokens; vocab_size: `size` rounded up to a multiple of 128, for the model; end_id: the end
    token's id; sha256: of the file that `save` writes.
    """

    def __init__(self, inner: tokenizers.Tokenizer, end_token: str | None = None, origin: str = "tokenizer"):
        """Wrap a `tokenizers.Tokenizer`. Raises ValueError if its vocabulary has no end-of-document token."""
        inner.encode_special_tokens = True
        inner.no_padding()
        inner.no_truncation()
        candidates = (end_token,) if end_token else KNOWN_END_TOKENS
        ids = {token: inner.token_to_id(token) for token in candidates}
        found = [(token, number) for token, number in ids.items() if number is not None]
        if not found:
            raise ValueError(
                f"{origin}: no end-of-document token: none of {', '.join(candidates)} is in its vocabulary. "
                f"Set the one it has with --end-token or data.end_token."
            )
        self._inner = inner
        self.end_token, self.end_id = found[0]
        self.size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self.vocab_size = padded_size(self.size)
        self.sha256 = hashlib.sha256(self.serialized()).hexdigest()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Train a byte-level BPE of `vocab_size` tokens, rounded up to a multiple of 128 (at least 384)."""
        if vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"tokenizer: vocab_size must be at least {SMALLEST_VOCABULARY} (256 bytes, the end "
                f"token and some merges), got {vocab_size}. Raise vocab_size; 32768 is typical."
            )
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        trainer = trainers.BpeTrainer(
            vocab_size=padded_size(vocab_size),
            special_tokens=[END_TOKEN],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @classmethod
    def load(cls, path: Path | str, end_token: str | None = None) -> Self:
        """Read a tokenizer.json or a folder with one, a tekken.json, "tekken", or a transformers tokenizer by
        its folder or Hub name.

        Raises ValueError if the file is missing or is not a tokenizer.
        """
        name, path = str(path), Path(path)
        if name == TEKKEN and not path.exists():
            path = shipped_tekken()
        file = path / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            return cls(_read(file), end_token, origin=str(file))
        if (path / "tokenizer_config.json").is_file() or _HUB_NAME.fullmatch(name):
            inner, default_end = _from_transformers(name)
            return cls(inner, end_token or default_end, origin=name)
        raise ValueError(f"{file}: no such tokenizer file. Correct the path, or pass a Hub name.")

    def save(self, path: Path | str) -> None:
        """Write a tokenizer.json; it appears complete or not at all."""
        write_whole(Path(path), self.serialized())

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without an end token."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_bare(self, texts: Sequence[str]) -> None:
        """Only the part of `encode_batch` inside the `tokenizers` library, for benchmarks."""
        self._inner.encode_batch_fast(list(texts), add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The tokens of many texts, encoded in parallel."""
        for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False):
            yield encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without end tokens. Raises ValueError for a token outside the vocabulary."""
        ids = [int(token) for token in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.size:
            raise ValueError(
                f"tokenizer: tokens must be in [0, {self.size}), got {min(ids)} to {max(ids)}. "
                "Decode with the tokenizer that wrote them."
            )
        return self._inner.decode(ids, skip_special_tokens=True)

    def opening(self) -> list[int]:
        """The tokens that the file adds before every text, such as a beginning-of-sequence token."""
        bare = self._inner.encode("a", add_special_tokens=False).ids
        whole = self._inner.encode("a", add_special_tokens=True).ids
        start = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
        return whole[:start]

    def encodes_like(self, other: "Tokenizer") -> bool:
        """Whether both give every text the same tokens.

        Tokens that their files add around a text do not count, because `encode` adds none.
        """
        own, theirs = (json.loads(each.serialized()) | {"post_processor": None} for each in (self, other))
        return own == theirs

    def padding(self) -> tuple[str, int]:
        """The token that pads a batch, and its id: a padding token in the vocabulary, or the end token."""
        for token in KNOWN_PAD_TOKENS:
            if (number := self._inner.token_to_id(token)) is not None:
                return token, number
        return self.end_token, self.end_id

    def serialized(self) -> bytes:
        """The content of the tokenizer.json that `save` writes."""
        return self._inner.to_str(pretty=False).encode()


def _read(file: Path) -> tokenizers.Tokenizer:
    if is_tekken(file):
        return load_tekken(file)
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every malformed file
        raise ValueError(
            f"{file}: not a tokenizer.json: {error}. Pass one of the tokenizers library."
        ) from error


def _from_transformers(name: str) -> tuple[tokenizers.Tokenizer, str | None]:
    """The `tokenizers` object inside a transformers tokenizer, and its end token if it has one."""
    try:
        outer = load_transformers(f"the tokenizer {name}").AutoTokenizer.from_pretrained(name)
    except (OSError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{name}: no such tokenizer file, and transformers reports: {reason}") from error
    inner = getattr(outer, "backend_tokenizer", None)
    if not isinstance(inner, tokenizers.Tokenizer):
        raise ValueError(
            f"{name}: {type(outer).__name__} is not based on the `tokenizers` library. Pass a fast tokenizer."
        )
    return inner, outer.eos_token
