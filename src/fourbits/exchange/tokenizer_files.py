"""The files from which transformers' AutoTokenizer reads our tokenizer.

It then encodes a text to the tokens that the model was trained on. Tokens that a tokenizer.json may add
around a text are removed, because `Tokenizer.encode` adds none. Batches are padded with the vocabulary's
padding token if it has one, else with the end token; the attention mask hides both. Only these files and
generation_config.json name the padding token: for a `pad_token_id` in config.json, transformers sets its
embedding row to zero and does not train it.
"""

import json
from pathlib import Path
from typing import Any

from fourbits.data.tokenizer import Tokenizer
from fourbits.data.whole_file import read_json

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def tokenizer_files(tokenizer: Tokenizer, max_seq_len: int) -> dict[str, bytes]:
    """The content of tokenizer.json and tokenizer_config.json, by name."""
    described: dict[str, Any] = json.loads(tokenizer.serialized())
    if (described.get("post_processor") or {}).get(
        "type"
    ) != "ByteLevel":  # post-processing only moves offsets
        described["post_processor"] = None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.end_token,
        "pad_token": tokenizer.padding()[0],
        "padding_side": "left",  # so that nothing is added between a prompt and its continuation
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    return {
        TOKENIZER: (json.dumps(described, ensure_ascii=False) + "\n").encode(),
        TOKENIZER_CONFIG: (json.dumps(config, indent=2) + "\n").encode(),
    }


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a transformers model, with the end token that its configuration names.

    Raises ValueError if the folder has none.
    """
    path = folder / TOKENIZER_CONFIG
    described = read_json(path, "Download the model again.") if path.is_file() else {}
    named = described.get("eos_token")
    content = named.get("content") if isinstance(named, dict) else named
    return Tokenizer.load(folder, content if isinstance(content, str) else None)
