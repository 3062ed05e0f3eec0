"""torchtitan: a converter for its model registry. `torchtitan_trainer` has the matching Trainer."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import functools
from dataclasses import dataclass, field, fields
from typing import Any

from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.tools.logging import logger

from fourbits.linear.convert import convert


class FourbitsConverter(ModelConfigConverter):
    """Converts the model that a config builds: `model_registry(..., converters=[Config()])`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """recipe: as for `fourbits.convert`; options: its other arguments, such as exclude and seed."""

        recipe: str = "nvfp4"
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The same config, whose model is converted when it is built, before it is parallelized."""
        kind, options = type(model_config), {"recipe": self.config.recipe, **self.config.options}
        build = functools.partialmethod(_built, kind, options)
        converted = type(f"Fourbits{kind.__name__}", (kind,), {"build": build})
        return converted(**{f.name: getattr(model_config, f.name) for f in fields(model_config) if f.init})


def _built(config: Any, kind: Any, options: dict[str, Any], **kwargs: Any) -> Any:
    model = kind.build(config, **kwargs)
    logger.info(str(convert(model, **options)))
    return model
