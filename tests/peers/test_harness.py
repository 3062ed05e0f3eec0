"""lm-evaluation-harness runs our models: its own MMLU-Pro offline, its own Hugging Face model beside ours."""
# pyright: reportMissingImports=false

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fourbits.cli.main import main
from fourbits.exchange.folder import load_hf
from fourbits.exchange.tokenizer_files import load_tokenizer
from fourbits.harness.tasks import TaskOptions, load_tasks, run_tasks
from fourbits.harness.text_model import TextModel
from support.mmlu_pro_file import EXAMPLES, write_mmlu_pro
from support.small_runs import trained
from support.torchrun import torchrun

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("lm_eval")
TEXTS = ["Every block has", "sixteen codes", "one scale. " * 30]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"), pattern="-")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    assert main(["export", str(trained(folder, pattern="TT")), "--out", str(folder / "hf")]) == 0
    return folder / "hf"


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> Path:
    return write_mmlu_pro(tmp_path_factory.mktemp("datasets"))


class Answering(TextModel):
    """A model that answers (A) and records what it is asked."""

    prompts: list[str]

    def continued(self, texts, num_tokens, stops, sampling, on_progress=None):
        Answering.prompts = list(texts)
        Answering.asked = (num_tokens, stops[0], sampling)
        return ["Let me see. The answer is (A). So be it."] * len(texts), 0


def text_model(folder: Path, kind: Any = TextModel, **options: Any) -> TextModel:
    tokenizer = load_tokenizer(folder)
    model = load_hf(folder, compute_dtype=torch.float32).eval()
    return kind(model, tokenizer, options.pop("prefix", (tokenizer.end_id,)), **options)


def test_the_harness_own_mmlu_pro_runs_offline_on_local_files_with_5_shots(run, datasets, capsys):
    argv = ["eval", str(run), "--tasks", "mmlu_pro", "--datasets", str(datasets), "--no-text", "--json"]
    assert main([*argv, "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)["precisions"]["bf16"]["tasks"]
    assert found["mmlu_pro"]["shots"] == [EXAMPLES]
    assert found["mmlu_pro"]["questions"] == 14 * 2
    assert len(found) == 15
    assert found["mmlu_pro"]["metrics"]["exact_match,custom-extract"] == 0
    stored = json.loads((run / "evaluations" / "step_2.json").read_text())
    assert stored["precisions"]["bf16"]["tasks"] == found
    assert "exact_match (custom-extract)" in (run / "report.html").read_text()


def test_prompts_are_those_of_the_paper_and_answers_are_read_as_there(exported, datasets):
    tasks = load_tasks(["mmlu_pro"], TaskOptions(datasets=datasets))
    found = run_tasks(tasks, text_model(exported, Answering))
    (prompt,) = [text for text in Answering.prompts if "is 11 in law" in text]
    assert prompt.startswith(
        "The following are multiple choice questions (with answers) about law. Think step by"
    )
    assert prompt.count("Question:\n") == EXAMPLES + 1
    assert prompt.count("The answer is (") == EXAMPLES
    assert prompt.endswith("Answer: Let's think step by step.")
    num_tokens, stops, sampling = Answering.asked
    assert (num_tokens, stops, sampling.temperature) == (2048, ["Question:"], 0)
    # of the questions 10 and 11 of each subject, A answers the first
    assert found["mmlu_pro"]["metrics"]["exact_match,custom-extract"] == 0.5


def test_letters_are_scored_behind_the_examples_of_their_subject(exported, datasets):
    tasks = load_tasks(["mmlu_pro_letters"], TaskOptions(datasets=datasets))
    asked = {}
    for name, task in tasks.loaded["tasks"].items():
        task.build_all_requests(limit=1, rank=0, world_size=1)
        asked[name] = [instance.args for instance in task.instances]
    context, choice = asked["mmlu_pro_letters_law"][3]
    assert choice == " D"
    assert context.count("Question: ") == EXAMPLES + 1
    assert context.count(" in law?") == EXAMPLES + 1
    assert context.endswith("\nAnswer:")
    found = run_tasks(load_tasks(["mmlu_pro_letters"], TaskOptions(datasets=datasets)), text_model(exported))
    assert found["mmlu_pro_letters"]["questions"] == 28
    assert 0 <= found["mmlu_pro_letters"]["metrics"]["acc,none"] <= 1
    assert found["mmlu_pro_letters"]["shots"] == [EXAMPLES]


def test_two_processes_score_and_answer_as_one_does(run, datasets, tmp_path):
    """One question of each subject: one process has it, the other one pads."""
    found = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        tasks = "mmlu_pro_letters,mmlu_pro_law"
        words = ["eval", str(run), "--tasks", tasks, "--datasets", str(datasets), "--no-text", "--limit", "1"]
        ended = torchrun(ranks, [*words, "--device", "cpu", "--out", str(out)])
        assert ended.returncode == 0, ended.stderr
        found.append(json.loads(out.read_text())["precisions"]["bf16"]["tasks"])
    assert found[0] == found[1]
    assert found[0]["mmlu_pro_letters"]["questions"] == 14


def test_checkpoints_are_scored_while_a_run_trains(run, datasets, tmp_path, capsys):
    words = ["train", str(run / "config.yaml"), "--out", str(tmp_path / "run")]
    where = ["--train.evaluate_datasets", str(datasets)]
    assert main([*words, "--train.evaluate", "[mmlu_prox]", *where]) == 2
    assert "no task is called 'mmlu_prox'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*words, "--train.evaluate", "[text, mmlu_pro_letters]", *where]) == 0
    stored = json.loads((tmp_path / "run" / "evaluations" / "step_2.json").read_text())["precisions"]["bf16"]
    assert stored.keys() == {"text", "tasks"}
    assert stored["tasks"]["mmlu_pro_letters"]["questions"] == 28


def test_scores_and_answers_equal_those_of_the_harness_own_hugging_face_model(exported):
    """Without a prefix, which its tokenizer does not add."""
    from lm_eval.models.huggingface import HFLM

    from fourbits.harness.adapter import HarnessModel

    theirs = HFLM(pretrained=str(exported), dtype="float32", device="cpu", batch_size=2, max_length=64)
    ours = HarnessModel(text_model(exported, prefix=()))
    ours.text.model.config = replace(ours.text.model.config, max_seq_len=64)
    pairs = [
        SimpleNamespace(args=(text, f" {word} one"))
        for text in TEXTS
        for word in ("blocks", "scale", "codes")
    ]
    for (own, greedy), (other, same) in zip(
        ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
    ):
        assert own == pytest.approx(other, abs=1e-4)
        assert greedy == same
    whole = [SimpleNamespace(args=(text,)) for text in (*TEXTS, "Every block has sixteen codes. " * 120)]
    rolled = zip(ours.loglikelihood_rolling(whole), theirs.loglikelihood_rolling(whole), strict=True)
    for own, other in rolled:
        assert own == pytest.approx(other, rel=1e-5)
    prompts = [
        SimpleNamespace(args=(text, {"until": ["scale"], "max_gen_toks": 24, "do_sample": False}))
        for text in TEXTS
    ]
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)


def test_a_task_file_of_ones_own_reads_a_local_file(exported, tmp_path):
    rows = [{"text": "Every block has sixteen codes and one scale."}] * 2
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_texts.yaml").write_text(
        f"""task: own_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{tmp_path}/texts.jsonl"}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
    )
    model = text_model(exported)
    found = run_tasks(load_tasks(["own_texts"], TaskOptions(include=tmp_path)), model)
    tokens = model.tokenizer.encode(rows[0]["text"])
    inputs = torch.tensor([[*model.prefix, *tokens[:-1]]])
    with torch.no_grad():
        logits = model.model(inputs)[0].log_softmax(-1)
    bits = (
        -float(logits.gather(1, torch.tensor(tokens)[:, None]).sum())
        / len(rows[0]["text"])
        / 0.6931471805599453
    )
    assert found["own_texts"]["metrics"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize(
    ("names", "folder", "message"),
    [
        ("mmlu_prox", True, "no task is called 'mmlu_prox'. Did you mean 'mmlu_pro'"),
        ("mmlu_pro,mmlu_pro_law", True, "mmlu_pro_law is part of two of the given names"),
        ("hellaswag", True, "has no copy of the dataset Rowan/hellaswag. Put its files into"),
        ("hellaswag", False, "the dataset Rowan/hellaswag is not on this machine and cannot be downloaded"),
        ("paper-code", True, "humaneval_plus"),
        (",", True, "tasks: at least one is needed"),
    ],
)
def test_tasks_that_cannot_run_are_named_before_a_model_is_loaded(
    names, folder, message, datasets, run, capsys
):
    where = ["--datasets", str(datasets)] if folder else []
    before = sorted(path.name for path in run.iterdir())
    assert main(["eval", str(run / "nowhere"), "--tasks", names, *where, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_local_file_of_another_shape_is_named(tmp_path, capsys):
    folder = tmp_path / "TIGER-Lab" / "MMLU-Pro"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text('{"question": "cut off')
    argv = ["eval", str(tmp_path), "--tasks", "mmlu_pro_law", "--datasets", str(tmp_path), "--device", "cpu"]
    assert main(argv) == 2
    assert f"{folder}: cannot be read as the dataset TIGER-Lab/MMLU-Pro" in capsys.readouterr().err


def test_every_name_of_the_papers_lists_is_a_task_of_the_harness():
    from lm_eval.tasks import TaskManager

    from fourbits.harness.suites import NAMES, expanded

    names = expanded(NAMES)
    assert len(names) == 3 + 2 + 16 + 2 + 5
    assert set(names) <= set(TaskManager().all_tasks)
