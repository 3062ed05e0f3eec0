"""RunConfig: a whole run as one frozen tree, from a preset or a YAML file plus dotted overrides."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fourbits.data.config import STDLIB, DataConfig
from fourbits.data.corpora.tables import HUB
from fourbits.model.config import ModelConfig
from fourbits.model.presets import MODEL_PRESETS
from fourbits.recipe.overrides import with_both_sides
from fourbits.recipe.presets import credited, get_recipe, recipe_from_mapping
from fourbits.recipe.recipe import Recipe
from fourbits.recipe.schedules import get_schedule
from fourbits.settings import build, load_yaml, nearest, override, to_dict
from fourbits.train.parallel import ParallelConfig, require_even

# Random bits are keyed by the token's index in blocks of 16 (docs/nvfp4.md, section 11).
TOKEN_UNIT = 16
MAX_SEED = 1 << 32
# Beyond these, arithmetic on samples and tokens overflows, or the system refuses (threads).
MAX_VOCABULARY = 1 << 24
MAX_COUNT = defaultdict(lambda: 1 << 32, tokens=1 << 60, threads=1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW and its learning rate: warmup, constant, decay; betas and weight decay of arXiv:2509.25149.

    warmup_share, decay_share: fractions of all steps; the last step runs at lr * final_lr_factor. decay: the
    shape of the decay, a straight line or half a period of a cosine.
    warmup_steps: the warmup in steps instead, set when a run's length changes after it began. grad_clip:
    largest global gradient norm, None for no clipping. masters: the format of the weights between steps;
    bf16-sr rounds each update stochastically (docs/nvfp4.md, section 18), bf16-rne to nearest, which loses
    small updates. AdamW's moments and the gradients are always FP32.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float | None = 1.0
    warmup_share: float = 0.05
    warmup_steps: int | None = None
    decay_share: float = 0.2
    decay: Literal["linear", "cosine"] = "linear"
    final_lr_factor: float = 0.01
    masters: Literal["fp32", "bf16-sr", "bf16-rne"] = "fp32"

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            _require(getattr(self, name) > 0, name, "above 0", self)
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", "at least 0 and below 1", self)
        _require(self.weight_decay >= 0, "weight_decay", "at least 0", self)
        clip = self.grad_clip
        _require(clip is None or clip > 0, "grad_clip", "above 0, or null for no clipping", self)
        for name in ("warmup_share", "decay_share", "final_lr_factor"):
            _require(0 <= getattr(self, name) <= 1, name, "between 0 and 1", self)
        steps = self.warmup_steps
        _require(steps is None or steps >= 0, "warmup_steps", "at least 0, or null", self)
        shares = self.warmup_share + self.decay_share
        if shares > 1:
            raise ValueError(
                "warmup_share + decay_share must be at most 1, as both are fractions of the run, got "
                f"{shares}. Lower one of them."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length, batch sizes and device of a run, and what it saves.

    A step reads gradient_accumulation micro-batches of micro_batch_size sequences of seq_len tokens, on all
    ranks together. The run has `steps` steps, or as many as `tokens` need; exactly one of the two is given.
    Intervals are in steps; None validates or saves only at the end. save_every_minutes: also save after this
    many minutes. keep_checkpoints: how many of the newest are kept; keep_every: those whose step is a
    multiple of it are kept, too. background_saves: training waits only for a copy in the host's memory,
    which a thread writes to disk. time_limit: minutes after which the run saves and ends, to be resumed.
    validation_samples: sequences per source.
    backend: the GEMM backend; "native" uses the FP4 tensor cores of Blackwell, which "auto" selects if they
    pass a self-check. compile: "regions" compiles everything but the linear layers once per process, "model"
    the whole model. cuda_graph: on an NVIDIA GPU, replay micro-batches from CUDA graphs if the recipe does
    not depend on past steps, with the same bits. deterministic: on a GPU, forbid operations whose sums depend
    on the order in which threads finish, such as the usual backward pass of attention (docs/running.md).
    activation_checkpointing: "full" saves only the input of every block and recomputes the block in the
    backward pass, with the same bits; "selective" does so in every second block. non_finite: stop the run,
    skip the step, or roll back when the loss or a gradient is NaN or infinite; the update is skipped in any
    case. spike: what to do with a step whose loss is far above those before it (spikes.py): nothing, report
    it, skip its update, or roll back. rollback_steps: how far back at least (rollback.py); max_rollbacks: how
    often at most. sinks: where metrics go besides metrics.jsonl, "tensorboard", "wandb" or a registered name.
    recompute_check_interval: steps between checks for silent corruption, in which every rank computes the
    same micro-batch twice and compares the bits (recompute_check.py), null for none; recompute_mismatch: end
    the run before a step in which they differ, or report it and continue. health_interval: steps between
    samples of the layers' health (docs/health.md), null for none. evaluate: what is evaluated in BF16 after
    every evaluate_every-th checkpoint and at the end, "text" or tasks, whose datasets are read from the
    folder evaluate_datasets, if given (docs/evaluation.md).
    """

    steps: int | None = None
    tokens: int | None = None
    micro_batch_size: int = 8
    gradient_accumulation: int = 1
    seq_len: int = 256
    seed: int = 0
    validation_interval: int | None = None
    validation_samples: int = 32
    checkpoint_interval: int | None = None
    save_every_minutes: float | None = None
    keep_checkpoints: int = 2
    keep_every: int | None = None
    background_saves: bool = False
    time_limit: float | None = None
    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    spike: Literal["off", "report", "skip", "rollback"] = "report"
    rollback_steps: int = 100
    max_rollbacks: int = 5
    sinks: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "cuda", "rocm", "xpu", "mps"] = "auto"
    backend: Literal["auto", "emulated", "native"] = "auto"
    threads: int | None = None
    compile: Literal["none", "regions", "model"] = "regions"
    cuda_graph: bool = True
    deterministic: bool = False
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    log_interval: int = 10
    health_interval: int | None = 500
    recompute_check_interval: int | None = None
    recompute_mismatch: Literal["stop", "report"] = "stop"
    evaluate: tuple[str, ...] = ()
    evaluate_every: int = 1
    evaluate_datasets: str | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(
                f"exactly one of steps and tokens must be given, got {self.steps}, {self.tokens}. "
                "Set one of them, and the other to null."
            )
        optional = (
            *("steps", "tokens", "validation_interval", "checkpoint_interval", "threads", "keep_every"),
            *("health_interval", "recompute_check_interval"),
        )
        counts = ("keep_checkpoints", "rollback_steps", "max_rollbacks", "evaluate_every")
        sizes = ("micro_batch_size", "gradient_accumulation", "seq_len", "validation_samples", "log_interval")
        for name in (*sizes, *counts, *optional):
            value: int | None = getattr(self, name)
            if value is not None:
                _require(value >= 1, name, "at least 1", self)
                _require(value <= MAX_COUNT[name], name, f"at most {MAX_COUNT[name]:,}", self)
        for name in ("save_every_minutes", "time_limit"):
            minutes: float | None = getattr(self, name)
            _require(minutes is None or minutes > 0, name, "above 0 minutes, or null", self)
        _require(0 <= self.seed < MAX_SEED, "seed", "at least 0 and below 2^32", self)
        micro_batch = self.micro_batch_size * self.seq_len
        if micro_batch % TOKEN_UNIT:
            raise ValueError(
                f"micro_batch_size * seq_len must be a multiple of {TOKEN_UNIT}, the unit of random bits, "
                f"got {micro_batch}. Set seq_len to a multiple of {TOKEN_UNIT}."
            )
        if self.rolls_back and not self.checkpoint_interval:
            raise ValueError(
                "checkpoint_interval must be a number of steps if spike or non_finite is rollback, which "
                "needs checkpoints, got None. Set it, for example to 500."
            )

    @property
    def rolls_back(self) -> bool:
        """Whether a spike or a value that is not finite makes the run return to a checkpoint."""
        return "rollback" in (self.non_finite, self.spike)

    def evaluates(self, step: int) -> bool:
        """Whether the checkpoint of a step is evaluated."""
        every = self.checkpoint_interval and self.checkpoint_interval * self.evaluate_every
        return bool(self.evaluate) and (step == self.num_steps or bool(every and step % every == 0))

    @property
    def samples_per_step(self) -> int:
        """Sequences in one optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step."""
        return self.samples_per_step * self.seq_len

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps or -(-(self.tokens or 0) // self.tokens_per_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that determines a run. Raises ValueError for parts that do not fit together.

    model.vocab_size is set to the tokenizer's when the data are opened.
    """

    model: ModelConfig
    recipe: Recipe = field(default_factory=lambda: get_recipe("nvfp4"))
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        data = self.data
        vocabulary = max(self.model.vocab_size, data.vocab_size, data.model_vocab_size)
        if vocabulary > MAX_VOCABULARY:
            raise ValueError(
                f"vocab_size must be at most {MAX_VOCABULARY:,}, got {vocabulary}. Lower it in model or data."
            )
        if self.train.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"train.seq_len must be at most model.max_seq_len = {self.model.max_seq_len}, "
                f"got {self.train.seq_len}. Lower one or raise the other."
            )
        require_even(self.model, self.train.seq_len, self.parallel.tensor)


def config_from_mapping(
    mapping: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, where: str = "config"
) -> RunConfig:
    """A run from nested dicts, in which model and recipe may be names, with dotted overrides applied.

    An override of a whole part ("model", "recipe") is applied first, so that `--recipe mxfp4
    --recipe.wgrad.lhs.rht 16` changes mxfp4. Overriding one of train.steps and train.tokens unsets the other.
    data.paths and a data.tokenizer that is a file become absolute, so that a stored config.yaml works from
    any directory.
    """
    changes = dict(overrides or {})
    tree = {**mapping, **{part: changes.pop(part) for part in ("model", "recipe") if part in changes}}
    if isinstance(tree.get("model"), str):
        tree["model"] = to_dict(_model_preset(tree["model"], where))
    if isinstance(tree.get("recipe"), str):
        tree["recipe"] = to_dict(get_recipe(tree["recipe"]))
    elif isinstance(tree.get("recipe"), Mapping):
        tree["recipe"] = to_dict(recipe_from_mapping(tree["recipe"], f"{where}: recipe"))
    if isinstance(named := changes.get("recipe.schedule"), str) and not named.lstrip().startswith("["):
        changes["recipe.schedule"] = to_dict(get_schedule(named))
    for given, other in (("train.steps", "train.tokens"), ("train.tokens", "train.steps")):
        if given in changes:
            changes.setdefault(other, None)
    for name in ("data.paths", "train.sinks"):
        given = changes.get(name)
        if isinstance(given, str) and not given.lstrip().startswith("["):
            changes[name] = [given]
    config = override(build(RunConfig, tree, where), with_both_sides(changes), "setting")
    return replace(config, data=_from_anywhere(config.data), recipe=credited(config.recipe))


def load_config(
    source: str | Path, presets: Mapping[str, RunConfig], overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """Load the run of a preset's name or a YAML file, with dotted overrides.

    Raises ValueError for an unknown name or key, suggesting the nearest one, and for invalid values.
    """
    if str(source) in presets:
        return config_from_mapping(to_dict(presets[str(source)]), overrides, str(source))
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return config_from_mapping(load_yaml(path), overrides, str(path))
    if path.is_dir():
        raise ValueError(
            f"config: must be a preset or a .yaml file, got the folder {path}. Name a file in it."
        )
    raise ValueError(
        f"config: no preset is called {str(source)!r}.{nearest(source, list(presets))} "
        f"Presets: {', '.join(presets)}. Or pass a .yaml file."
    )


def _from_anywhere(data: DataConfig) -> DataConfig:
    """`data` with paths made absolute, relative to the working directory."""
    tokenizer = data.tokenizer
    if tokenizer is not None and Path(tokenizer).exists():
        tokenizer = str(Path(tokenizer).absolute())
    return replace(data, paths=tuple(_absolute(path) for path in data.paths), tokenizer=tokenizer)


def _absolute(given: str) -> str:
    """One of data.paths, made absolute: PATH or NAME=PATH. "stdlib" and Hub datasets are not paths."""
    named, path = _split(given)
    return given if path is None else f"{named}{Path(path).absolute()}"


def missing_path(given: str) -> Path | None:
    """The path in one of data.paths if nothing is there; None for what exists, or is no path."""
    _, path = _split(given)
    return None if path is None or Path(path).exists() else Path(path)


def _split(given: str) -> tuple[str, str | None]:
    """("NAME=" or "", the path) of one of data.paths; the path is None for "stdlib" and Hub datasets."""
    name, equals, path = given.partition("=")
    if not equals or not name.replace("-", "_").isidentifier():
        name, equals, path = "", "", given
    return name + equals, None if given == STDLIB or path.startswith(HUB) else path


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Dotted names of the settings that differ, in the order of the configuration."""
    return [name for name, value in _leaves(to_dict(new)).items() if _leaves(to_dict(old)).get(name) != value]


def _leaves(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {name: tree}
    return {
        path: value
        for key, below in tree.items()
        for path, value in _leaves(below, f"{name}.{key}" if name else key).items()
    }


def _model_preset(name: str, where: str) -> ModelConfig:
    if name not in MODEL_PRESETS:
        raise ValueError(
            f"{where}: model: no model is called {name!r}.{nearest(name, list(MODEL_PRESETS))} "
            f"Presets: {', '.join(MODEL_PRESETS)}. Or give its fields."
        )
    return MODEL_PRESETS[name]


def _require(holds: bool, name: str, rule: str, config: "OptimConfig | TrainConfig") -> None:
    """Raises ValueError about a field, with its default, unless a rule holds."""
    if not holds:
        default = type(config).__dataclass_fields__[name].default
        usual = f"Set it to {'null' if default is None else default}, the default"
        remedy = "Set the length of the run, in steps or tokens" if name in ("steps", "tokens") else usual
        raise ValueError(f"{name} must be {rule}, got {getattr(config, name)}. {remedy}.")
