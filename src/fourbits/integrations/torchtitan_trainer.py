"""torchtitan: its Trainer, with set_step before every micro-batch and the recipe in its checkpoints."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import json
from dataclasses import dataclass, fields
from typing import Any

from torchtitan.trainer import Trainer

from fourbits.integrations.checkpoint import restore_run_state, run_state
from fourbits.integrations.micro_batches import MicroBatches


class FourbitsTrainer(Trainer):
    """torchtitan's Trainer, which calls set_step and checks the recipe of a checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's settings. strict: a checkpoint of another recipe is an error; otherwise a warning."""

        strict: bool = True

        @classmethod
        def of(cls, config: Any) -> Any:
            """The settings of a config of torchtitan's own Trainer, such as those in its config_registry."""
            return cls(**{f.name: getattr(config, f.name) for f in fields(config) if f.init})

    def __init__(self, config: Config) -> None:
        """Raises ValueError for settings that converted layers do not support."""
        shares, backend = config.parallelism.tensor_parallel_degree > 1, config.parallelism.spmd_backend
        wrong = {
            "training.disable_cuda_graphs": (config.training.disable_cuda_graphs, True),
            # other backends give layers parts of weights without saying so, or meshes of several dimensions
            "parallelism.spmd_backend": (backend, "partial_dtensor" if shares else backend),
            "parallelism.pipeline_parallel_degree": (config.parallelism.pipeline_parallel_degree, 1),
        }
        for name, (value, needed) in wrong.items():
            if value != needed:
                raise ValueError(
                    f"FourbitsTrainer: {name} must be {needed}, got {value}. Set it to {needed}."
                )
        super().__init__(config)
        mesh = self.parallel_dims.get_optional_mesh("loss")
        rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        tokens = config.training.local_batch_size * config.training.seq_len // self.parallel_dims.cp
        self._batches = MicroBatches(self.model_parts[0], tokens, rank, ranks)

    def forward_backward_step(self, **kwargs: Any) -> Any:
        """torchtitan's step for a micro-batch, after set_step."""
        self._batches.begin(self.step - 1)
        return super().forward_backward_step(**kwargs)

    def state_dict(self) -> dict[str, Any]:
        """torchtitan's state, with the recipe."""
        return {**super().state_dict(), "fourbits": json.dumps(run_state(self.model_parts[0]))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torchtitan's state. Raises ValueError for another recipe, seed or choice of layers."""
        super().load_state_dict(state_dict)
        restore_run_state(self.model_parts[0], json.loads(state_dict["fourbits"]), None, self.config.strict)
