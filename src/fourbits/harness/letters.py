"""MMLU-Pro by letters only: a cheap curve during training, not the metric of papers.

The answer is the letter from A to J with the largest log-likelihood after "Answer:", with five examples of
the subject without their reasoning. mmlu_pro lets the model reason in up to 2,048 tokens and reads the letter
from its text; the two numbers are not comparable. A question costs one pass over its prompt.
"""

from functools import partial
from typing import Any

from fourbits.data.optional import load_lm_eval

NAME = "mmlu_pro_letters"
LETTERS = "ABCDEFGHIJ"
SUBJECTS = (
    "biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history",
    "law", "math", "other", "philosophy", "physics", "psychology",
)  # fmt: skip


def letters_group() -> Any:
    """The group of the harness: a task for each subject, and their mean over all questions."""
    harness = load_lm_eval(f"the task {NAME}")
    group = harness.api.group.Group.from_config(
        harness.api.group.GroupConfig(
            group=NAME,
            aggregate_metric_list=[{"metric": "acc", "aggregation": "mean", "weight_by_size": True}],
        )
    )
    for subject in SUBJECTS:
        group.add(harness.api.task.ConfigurableTask(config=_config(subject)))
    return group


def _config(subject: str) -> dict[str, Any]:
    return {
        "task": f"{NAME}_{subject.replace(' ', '_')}",
        "task_alias": subject,
        "dataset_path": "TIGER-Lab/MMLU-Pro",
        "test_split": "test",
        "fewshot_split": "validation",
        "fewshot_config": {"sampler": "first_n"},
        "process_docs": partial(_of_subject, subject=subject),
        "description": f"The following are multiple choice questions (with answers) about {subject}.\n\n",
        "output_type": "multiple_choice",
        "doc_to_text": _question,
        "doc_to_choice": _letters,
        "doc_to_target": "answer_index",
        "num_fewshot": 5,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def _of_subject(documents: Any, subject: str) -> Any:
    return documents.filter(lambda document: document["category"] == subject)


def _question(document: dict[str, Any]) -> str:
    options = zip(LETTERS, document["options"], strict=False)
    lines = [f"{letter}. {option.strip()}" for letter, option in options]
    return "\n".join((f"Question: {document['question'].strip()}", "Options:", *lines, "Answer:"))


def _letters(document: dict[str, Any]) -> list[str]:
    return list(LETTERS[: len(document["options"])])
