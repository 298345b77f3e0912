"""One Adam step of a tile.

Additions are fused with multiplications only where `fma` says so (`enable_fp_fusion=False` in every
launch); roots and quotients are rounded correctly. So a step has the same bits in all kernels, but
for those missed ones that the C++ kernel replays with AVX-512.
"""

import triton
import triton.language as tl


@triton.jit
def adam_step(
    w,
    m,
    v,
    g,
    beta1,
    rest1,
    beta2,
    rest2,
    alpha,
    eps,
    keep,
):
    """Weights and both moments after a step; `rest1` is `1 - beta1`."""
    m = tl.fma(m, beta1, rest1 * g)
    v = tl.fma(v, beta2, rest2 * g * g)
    w = tl.fma(w, keep, -tl.div_rn(alpha * m, tl.sqrt_rn(v) + eps))
    return w, m, v
