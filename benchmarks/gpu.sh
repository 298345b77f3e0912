#!/bin/sh
# Correctness, then speed, on a machine with a GPU, torch and Triton, and no network:
#
#     sh benchmarks/gpu.sh PACKAGE_DIR [correctness|update|training|profile|all] [OUT.json]
#
# PACKAGE_DIR holds FBGEMM, torchrec, pydantic and what they need, packed for that machine; where it
# is `-`, they are installed already. Each part ends within 8 minutes. Whatever the part, the
# correctness comes first: figures of kernels that compute something else are worth nothing. Where
# OUT.json holds that of this code on this machine, GPU_OPTIONS=--checked takes its word.
# PYTHON is the interpreter, python3 unless it is given.
set -e
package=${1:?"usage: sh benchmarks/gpu.sh PACKAGE_DIR [part] [OUT.json]"}
part=${2:-all}
root=$(cd "$(dirname "$0")/.." && pwd)
out=${3:-$root/benchmarks/results/gpu.json}

if [ "$package" != - ]; then
    environment=$(sh "$package/unpack.sh" "${TMPDIR:-/tmp}/stampede-site")
    eval "$environment"
fi
# stampede/ at the root is the package; its links lead to the other folders.
export PYTHONPATH="$root:$root/tests:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}"

mkdir -p "$(dirname "$out")"
"${PYTHON:-python3}" "$root/benchmarks/gpu/run.py" "$part" --out "$out" ${GPU_OPTIONS:-}
