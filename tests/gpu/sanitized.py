"""Every kernel once, for compute-sanitizer: products, sums, policies, quantizers, Mamba layers, decoding.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=tests
    compute-sanitizer --error-exitcode 9 python -m gpu.sanitized

Without torch's cache each tensor is an allocation of its own, so that an access beyond it is seen.
Compilation takes minutes: `python -m gpu.sanitized 2 8` is the third of eight shares, to run side by side.
With the argument `planted` a store out of bounds follows, which must be found.
"""
# pyright: reportArgumentType=false
# (kernels take plain numbers as constants)

import sys
import warnings

import torch
import triton
import triton.language as tl

from fourbits.model.ops import self_check
from fourbits.quant.cpu import compiled
from support.chain_cases import checks
from support.decoding_cases import STEPS, state_errors, step_errors
from support.decoding_cases import norm_errors as add_norm_errors
from support.fused_cases import POLICIES, SMALL, differences, policy_differences
from support.matmul_cases import SMALL as GEMMS
from support.matmul_cases import excess
from support.mixer_cases import CONVS, NORMS, conv_errors, norm_errors

#: head dim and state of scans
SCANS = [(64, 128), (80, 128), (16, 32)]


@triton.jit
def planted_kernel(out_ptr, SIZE: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, SIZE), tl.zeros((SIZE,), tl.float32))


def main(planted: bool, share: int = 0, shares: int = 1) -> int:
    """Run this share of all cases and say how many are wrong."""
    compiled.COMPILE_FROM = 1 << 60  # pyright: ignore[reportConstantRedefinition]
    warnings.simplefilter("ignore", RuntimeWarning)
    every = slice(share, None, shares)
    products, policies, cases = GEMMS[every], POLICIES[every], SMALL[every]
    sums = [check for _, check in checks("cuda")][every]
    # From the middle on, because the first shares have the policies and scans take as long to compile.
    every = slice((share + shares // 2) % shares, None, shares)
    scans, convs, norms = SCANS[every], CONVS[every], NORMS[every]
    wrong = sum(not excess(product, "cuda") <= 1 for product in products)
    wrong += sum(bool(check()) for check in sums)
    wrong += sum(bool(policy_differences(stored, "cuda", name)) for stored, name in policies)
    wrong += sum(bool(differences(case, "cuda")) for case in cases)
    for sizes in scans:
        errors = self_check.check(torch.device("cuda"), torch.bfloat16, *sizes).values()
        wrong += not all(error <= 1 for error in errors)
    wrong += sum(bool(conv_errors(case, "cuda", torch.bfloat16)) for case in convs)
    wrong += sum(bool(norm_errors(case, "cuda", torch.bfloat16)) for case in norms)
    steps = STEPS[every]
    wrong += sum(bool(step_errors(case, "cuda", torch.bfloat16)) for case in steps)
    if share == 0:
        wrong += bool(state_errors(70, True, "cuda", torch.bfloat16))
        wrong += bool(add_norm_errors((3, 1, 48), torch.bfloat16, torch.bfloat16, "cuda"))
    torch.cuda.synchronize()
    print(
        f"{len(products)} products, {len(sums)} sums, {len(policies)} policies, {len(cases)} cases, "
        f"{len(scans)} scans,",
        end=" ",
    )
    print(f"{len(convs) + len(norms)} convolutions and norms; {wrong} wrong")
    if planted:
        planted_kernel[(1,)](torch.empty(64, device="cuda"), SIZE=1024)
        torch.cuda.synchronize()
    return wrong


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:] if argument != "planted"]
    sys.exit(main("planted" in sys.argv[1:], *numbers))
