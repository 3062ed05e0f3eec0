"""Named lists of tasks: those of arXiv:2509.25149, table 2, with their numbers of examples in a prompt.

The paper gives the number for MMLU-Pro only (5, with chain of thought); the others are customary. Tasks are
the harness' own. Two differ from the paper's in kind: its AGIEval answers by chain of thought, and its ARC-C
has the choices in the question; here both are scored by log-likelihood.
"""

from collections.abc import Sequence

LANGUAGES = ("ar", "bn", "de", "en", "es", "fr", "hi", "id", "it", "ja", "ko", "pt", "sw", "yo", "zh")
#: group of the paper -> task of the harness -> examples in a prompt; None: the task's default
PAPER: dict[str, dict[str, int | None]] = {
    "paper-general": {"mmlu": 5, "mmlu_pro": None, "agieval_en": None},
    "paper-math": {"gsm8k_cot": 8, "minerva_math": 4},
    "paper-multilingual": {
        **{f"global_mmlu_{language}": 5 for language in LANGUAGES},
        "mgsm_cot_native": 8,
    },
    "paper-code": {"humaneval_plus": None, "mbpp_plus": None},
    "paper-commonsense": {
        "arc_challenge": 25,
        "hellaswag": 10,
        "openbookqa": 0,
        "piqa": 0,
        "winogrande": 5,
    },
}
#: (task, its metric in the harness) -> the paper's results in per cent: FP8 and NVFP4, evaluated in BF16
PAPER_RESULTS = {
    ("mmlu", "acc,none"): (77.36, 76.57),
    ("mmlu_pro", "exact_match,custom-extract"): (62.62, 62.58),
    ("agieval_en", "acc,none"): (67.01, 70.31),
    ("gsm8k_cot", "exact_match,flexible-extract"): (89.08, 92.27),
    ("minerva_math", "math_verify,none"): (83.32, 81.48),
    ("mgsm_cot_native", "exact_match,flexible-extract"): (81.87, 85.53),
    ("humaneval_plus", "pass@1,create_test"): (59.93, 57.43),
    ("mbpp_plus", "pass_at_1,none"): (59.11, 55.91),
    ("arc_challenge", "acc_norm,none"): (91.81, 91.81),
    ("hellaswag", "acc_norm,none"): (83.83, 83.09),
    ("openbookqa", "acc_norm,none"): (47.60, 47.40),
    ("piqa", "acc_norm,none"): (82.64, 82.70),
    ("winogrande", "acc,none"): (80.58, 78.77),
}
ALL = "paper"
NAMES = (ALL, *PAPER)


def expanded(names: Sequence[str]) -> dict[str, int | None]:
    """Tasks of the harness -> examples in a prompt, for names of tasks and suites, each task once."""
    found: dict[str, int | None] = {}
    for name in names:
        suites = PAPER.values() if name == ALL else [PAPER[name]] if name in PAPER else [{name: None}]
        for suite in suites:
            found |= suite
    return found
