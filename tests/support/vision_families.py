"""Random-init vision transformers of timm, small enough for a CPU: (model, inputs) by name."""

import importlib.abc
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import nn

# pyright: reportMissingImports=false

Inputs = dict[str, Any]
SIZES: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "depth": 3, "num_heads": 4}
PATCHES: dict[str, Any] = {**SIZES, "patch_size": 8}
STAGES: dict[str, Any] = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "window_size": 4}
WINDOWS: dict[str, Any] = {**STAGES, "depths": (2, 2), "num_heads": (1, 2)}
#: not from the class token, beside which the gradients of other tokens vanish: there fourbits warns, rightly
AVERAGED: dict[str, Any] = {**PATCHES, "global_pool": "avg"}
#: timm's name -> the sizes that make it small
MODELS: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": PATCHES,
    "vit_base_patch16_rope_224": AVERAGED,
    "vit_relpos_base_patch16_224": PATCHES,
    "beit_base_patch16_224": PATCHES,
    "beitv2_base_patch16_224": PATCHES,
    "eva02_base_patch14_224": PATCHES,
    "eva_giant_patch14_224": PATCHES,
    "deit3_base_patch16_224": AVERAGED,
    "cait_s24_224": PATCHES,
    "convit_base": PATCHES,
    "xcit_small_12_p16_224": PATCHES,
    "naflexvit_base_patch16_gap": {"embed_dim": 32, "depth": 3, "num_heads": 4, "patch_size": 8},
    "swin_tiny_patch4_window7_224": WINDOWS,
    "swinv2_tiny_window8_256": WINDOWS,
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2)},
    "convnext_tiny": {"depths": (1, 1, 2, 1), "dims": (16, 32, 32, 32)},
}


class Reading(type):
    """A class that stands for one of torchvision; its attributes are their names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Standing(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Reading(name, (nn.Module,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        mine = fullname.partition(".")[0] == "torchvision"
        return ModuleSpec(fullname, self, is_package=True) if mine else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Standing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def torchvision_stands() -> Generator[None]:
    """While timm is imported, empty classes in place of torchvision, which reads its images.

    PyPI's torchvision needs CUDA's libraries, and without them a PyTorch for CPUs cannot import it.
    """
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def vision(name: str) -> Callable[[], tuple[nn.Module, Inputs]]:
    """A classifier of timm with random weights, also in the head and where timm begins with zeros."""

    def made() -> tuple[nn.Module, Inputs]:
        with torchvision_stands():
            import timm
        model = timm.create_model(name, num_classes=10, **MODELS[name])
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        size = MODELS[name].get("img_size", 32)
        return model, {"x": torch.randn(2, 3, size, size)}

    return made


VISION = {name: vision(name) for name in MODELS}
