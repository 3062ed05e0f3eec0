"""GPUs by their compute capability, for plans and builds on a machine without one."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from fourbits.gemm.kernels import launch_bf16, launch_chain, launch_fp8, tiles
from fourbits.model.ops.ssd.kernels import launch_config
from fourbits.quant.kernels import launch_dequantize, launch_packed, launch_unpack, support

#: bytes of shared memory that a program can have, by compute capability (CUDA C++ Programming Guide, table of
#: technical specifications per compute capability)
SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    103: 227 << 10,
    120: 99 << 10,
    121: 99 << 10,
}
#: what depends on the GPU and is computed once
_CACHED = (
    *(launch_bf16.bf16_gemm, launch_chain.chain_gemm, launch_fp8.launcher, tiles.gpu_model),
    *(launch_config.launch_config, launch_dequantize.dequantizer, launch_dequantize.transposer),
    *(launch_unpack.launcher, launch_unpack.transposed_launcher, launch_packed._converts, support.has_fp8),
)


@contextmanager
def planning_for(capability: int) -> Generator[None]:
    """Plans for a CUDA device are those of a GPU of this compute capability."""
    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=132,
        shared_memory_per_block_optin=SHARED_MEMORY[capability],
    )
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda device: properties))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda device: (major, minor)))
        stack.enter_context(patch.object(support, "unsupported_device", lambda device: None))
        for cached in _CACHED:
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield
