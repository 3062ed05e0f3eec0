"""docs/exchange.md: the path from training to an answer works as printed, in an empty folder."""

import contextlib
import io
import shlex
from pathlib import Path
from typing import Any

import pytest

from fourbits.cli.main import main
from support.documented import blocks_of

PAGE = Path(__file__).parents[1] / "docs" / "exchange.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_path_from_training_to_an_answer_works_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (commands,) = blocks_of("From training to an answer", "sh", PAGE)
    (code,) = blocks_of("From training to an answer", "python", PAGE)
    for line in commands.splitlines():
        program, *words = shlex.split(line)
        assert program == "fourbits"
        assert main(words) == 0
    names: dict[str, Any] = {"__name__": "documented"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, PAGE.name, "exec"), names)
    assert out.getvalue().startswith("import os")
    answer, prompt = names["answer"][0], names["prompt"]["input_ids"][0]
    assert 1 <= len(answer) - len(prompt) <= 20
