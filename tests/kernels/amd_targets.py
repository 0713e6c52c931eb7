"""Compile every Triton kernel for AMD GPUs, which needs no GPU, and print the result as JSON.

Runs in a process that has Triton on its path: `python amd_targets.py gfx90a gfx942`.
"""

import inspect
import json
import re
import sys
from importlib import import_module

import triton.language as tl
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

MODULES = ("cross_entropy", "elementwise", "float8_triton", "multi_tensor", "packed_weights")
TYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}
# a wave has 64 threads; the local memory of a workgroup has 64 KiB
WAVE, LOCAL_MEMORY = 64, 65536


def launches():
    """Yield kernel name, argument types and constants of every way in which the kernels are launched."""
    for x in ("bf16", "fp32"):
        row = {
            "stride": "i32",
            "width": "i32",
            "columns": "i32",
            "rows": "i32",
            "BLOCK": 4096,
            "num_warps": 8,
        }
        logits = {"logits": f"*{x}", **row}
        yield "_scaled", {"tensor": f"*{x}", "result": f"*{x}", "factor": "*fp32", "count": "i32", **row}
        rest = {"labels": "*i64", "losses": "*fp32", "ignored": "i32", "z_loss": "fp32"}
        yield "_whole", {**logits, **rest}
        yield "_statistics", {**logits, "targets": "*i64", "found": "*fp32"}
        yield "_gradient", {**logits, "targets": "*i64", "tops": "*fp32", "factors": "*fp32"}
        for width, warps in ((2048, 4), (8192, 8), (16384, 16)):
            given = {"x": f"*{x}", "weight": f"*{x}", "bias": f"*{x}", "y": f"*{x}", "y_grad": f"*{x}"}
            given |= {"residual_grad": f"*{x}", "x_grad": f"*{x}", "means": "*fp32", "scales": "*fp32"}
            given |= {"sums": "*fp32", "rows": "i32", "width": "i32", "eps": "fp32"}
            # on AMD nothing is loaded ahead
            given |= {"BLOCK": width, "STAGES": 1, "num_warps": warps}
            yield "_norm_forward", given
            yield "_norm_backward", given
        tile = {"rows": "i32", "width": "i32", "programs": "i32", "sums": "*fp32", "result": f"*{x}"}
        gelu = {"z": f"*{x}", "bias": f"*{x}", "h": f"*{x}", "h_grad": f"*{x}", "z_grad": f"*{x}", **tile}
        yield "_gelu_forward", {**gelu, "ROWS": 16, "COLUMNS": 128}
        yield "_gelu_backward", {**gelu, "ROWS": 16, "COLUMNS": 128, "STAGES": 1}
        yield "_sum_kernel", {**tile, "ROWS": 64, "COLUMNS": 64}
        joint = {"y": f"*{x}", "h": f"*{x}", "gradient": f"*{x}", "y_grad": f"*{x}", "width": "i32"}
        yield "swiglu_forward", {**joint, "BLOCK": 4096, "num_warps": 8}
        yield "swiglu_backward", {**joint, "BLOCK": 4096, "num_warps": 8}
        yield (
            "_largest",
            {"x": f"*{x}", "found": "*fp32", "row": "i32", "count": "i32", "BLOCK": 8192, "num_warps": 8},
        )
        for wide, kind in ((False, "fp8e4nv"), (True, "fp8e5")):
            cast = {"x": f"*{x}", "cast": f"*{kind}", "transposed": f"*{kind}", "transposed_stride": "i32"}
            cast |= {"largest": "*fp32", "scale": "*fp32", "first": "i32", "rows": "i32", "columns": "i32"}
            cast |= {
                "FOUND": 3072,
                "HELD": 4096,
                "WIDE_RANGE": wide,
                "MOST": 448.0,
                "ROWS": 64,
                "COLUMNS": 128,
            }
            yield "_cast_both", cast
        for size in (64, 32):
            stored = {"packed": "*u8", "scales": "*fp32", "levels": "*fp32", "weight": f"*{x}"}
            stored |= {"count": "i32", "blocks": "i32", "columns": "i32", "BYTES": size, "BLOCKS": 32}
            yield "_unpack", stored
        for aligned in (True, False):
            tables = {"owners": "*i32", "sizes": "*i64", "first_blocks": "*i32", "ALIGNED": aligned}
            squares = {"sums": "*fp32", "table": "*i64", "TYPE": TYPES[x], "BLOCK": 8192, "num_warps": 4}
            yield "_sum_of_squares", {**tables, **squares}
    # weights, lower halves of master weights, moments
    for weight, split, moment in (
        ("bf16", True, "fp32"),
        ("fp32", False, "fp32"),
        ("bf16", False, "bf16"),
        ("bf16", True, "bf16"),
    ):
        rows = dict.fromkeys(("weights", "lows", "gradients", "firsts", "seconds"), "*i64")
        numbers = dict.fromkeys(("lr", "beta1", "rest1", "beta2", "rest2", "eps"), "fp32")
        given = {"owners": "*i32", "sizes": "*i64", "first_blocks": "*i32", **rows, **numbers}
        given |= {"decays": "*fp32", "keys": "*i32", "scalars": "*fp32", "step": "i32", "SPLIT": split}
        given |= {"WEIGHT": TYPES[weight], "GRADIENT": TYPES[weight], "MOMENT": TYPES[moment]}
        yield "_adamw", {**given, "ALIGNED": True, "BLOCK": 1024, "num_warps": 4}


def kernels():
    """Return the kernels that Python launches, by name; others are parts of kernels."""
    found = {}
    for module in map(import_module, (f"arriero.kernels.{name}" for name in MODULES)):
        found |= {name: each for name, each in vars(module).items() if isinstance(each, JITFunction)}
    # a part is called by another kernel, after the line that defines it
    bodies = "\n".join(inspect.getsource(each.fn).partition("\n")[2] for each in found.values())
    return {name: each for name, each in found.items() if not re.search(rf"(?<!def )\b{name}\(", bodies)}


def compiled(kernel, given, target):
    constants = {n: given[n] for n in kernel.arg_names if not isinstance(given[n], str)}
    signature = {n: "constexpr" if n in constants else given[n] for n in kernel.arg_names}
    made = compile_kernel(
        ASTSource(kernel, signature=signature, constexprs=constants),
        target=GPUTarget("hip", target, WAVE),
        options={"num_warps": given.get("num_warps", 4)},
    )
    assert made.metadata.shared <= LOCAL_MEMORY, (kernel.__name__, made.metadata.shared)
    return len(made.asm["hsaco"])


def main(targets):
    known, found = kernels(), {}
    for name, given in launches():
        for target in targets:
            found.setdefault(f"{name} {target}", []).append(compiled(known[name], given, target))
    print(json.dumps({"kernels": sorted(known), "compiled": found}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
