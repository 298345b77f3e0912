"""Compiles the Triton kernels for a GPU that need not be there; prints what the code contains.

The interpreter runs kernels that the compiler refuses.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stampede.optim.triton import block_sizes, steps, sum_runs

DIM, CAPABILITY = 12, 90
TYPES = {
    **dict.fromkeys(["source", "starts", "count", "nonfinite", "last"], "*i32"),
    **dict.fromkeys(["ordered", "rows", "row_counts"], "*i64"),
    **dict.fromkeys(["stride", "windows", "capacity"], "i32"),
    **dict.fromkeys(["first_row", "number", "first_step", "now", "step"], "i32"),
    **dict.fromkeys(["ratio", "lowest", "decay", "beta1", "rest1", "beta2", "rest2"], "fp32"),
    **dict.fromkeys(["alpha", "eps", "keep"], "fp32"),
}


def compiled(kernel, warps, **constants):
    signature = {
        name: "constexpr" if name in constants else TYPES.get(name, "*fp32")
        for name in kernel.arg_names
    }
    values = {
        (place,): constants[name]
        for place, name in enumerate(kernel.arg_names)
        if name in constants
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=values)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    target = GPUTarget("cuda", CAPABILITY, 32)
    return triton.compile(source, target=target, options=options).asm["ptx"]


def main():
    sizes, code = block_sizes(DIM, 1 << 20), {}
    columns = {"DIM": DIM, "COLUMNS": sizes.columns}
    tile = {**columns, "WINDOW": sizes.window}
    wide = {**tile, "TOGETHER": sizes.together}
    code["join"] = compiled(sum_runs._join_windows, sizes.window_warps, **wide)
    for on in (True, False):
        weighted = {"WEIGHTED": on, **({} if on else {"coefficient": None})}
        code[f"windows {on}"] = compiled(
            sum_runs._sum_windows, sizes.window_warps, **wide, **weighted
        )
        code[f"runs {on}"] = compiled(
            sum_runs._sum_runs,
            sizes.run_warps,
            **tile,
            **weighted,
            CLIPPED=DIM - 2,
            RUNS=sizes.runs,
            UNROLL=sizes.unroll,
        )
        code[f"update {on}"] = compiled(
            steps._update_rows,
            sizes.row_warps,
            **columns,
            **{"CLIPS": on, "COUNTS": on, "MARKS": on},
            **({} if on else {"row_counts": None, "last": None}),
            CLIPPED=DIM - 2,
            ROWS=sizes.rows,
        )
        code[f"replay {on}"] = compiled(
            steps._replay,
            sizes.element_warps,
            LISTED=on,
            DIM=DIM,
            BLOCK=sizes.elements,
            **({} if on else {"rows": None, "count": None}),
        )
    code["mark"] = compiled(steps._mark_rows, 4, BLOCK=256)
    words = ("fma.rn.f32", "div.rn.f32", "sqrt.rn.f32", "approx", "div.full", ".ftz")
    json.dump({k: {w: ptx.count(w) for w in words} for k, ptx in code.items()}, sys.stdout)


if __name__ == "__main__":
    main()
