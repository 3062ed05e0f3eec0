"""A made-up data set of MMLU-Pro's shape, as local files: 5 examples and some questions for each subject."""

import json
from pathlib import Path
from typing import Any

from fourbits.harness.letters import LETTERS, SUBJECTS

EXAMPLES = 5


def write_mmlu_pro(folder: Path, questions: int = 2) -> Path:
    """Write FOLDER/TIGER-Lab/MMLU-Pro and return FOLDER."""
    dataset = folder / "TIGER-Lab" / "MMLU-Pro"
    dataset.mkdir(parents=True)
    for split, numbers in (("validation", range(EXAMPLES)), ("test", range(10, 10 + questions))):
        rows = [row(number, subject) for subject in SUBJECTS for number in numbers]
        (dataset / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


def row(number: int, subject: str) -> dict[str, Any]:
    answer = number % 10
    return {
        "question_id": number,
        "question": f"Which of these is {number} in {subject}?",
        "options": [f"the number {number - answer + place}" for place in range(10)],
        "answer": LETTERS[answer],
        "answer_index": answer,
        "cot_content": f"A: Let's think step by step. It is {number}. The answer is ({LETTERS[answer]}).",
        "category": subject,
        "src": "made up",
    }
