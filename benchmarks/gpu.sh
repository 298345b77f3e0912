#!/bin/sh
# Correctness and speed on a machine with a GPU, torch and Triton, and no network:
#
#     sh benchmarks/gpu.sh PACKAGE_DIR first|second [OUT.json]
#
# PACKAGE_DIR holds FBGEMM, torchrec, pydantic and what they need, packed for that machine; where it
# is `-`, they are installed already. `first` takes at most five minutes, `second` less than ten,
# whatever hangs; OUT.json is written as it grows. PYTHON is the interpreter, python3 unless it is
# given; GPU_OPTIONS are options of gpu/run.py.
set -e
began=$(date +%s)
package=${1:?"usage: sh benchmarks/gpu.sh PACKAGE_DIR first|second [OUT.json]"}
command=${2:?"usage: sh benchmarks/gpu.sh PACKAGE_DIR first|second [OUT.json]"}
root=$(cd "$(dirname "$0")/.." && pwd)
out=${3:-$root/benchmarks/results/gpu.json}

if [ "$package" != - ]; then
    environment=$(sh "$package/unpack.sh" "${TMPDIR:-/tmp}/stampede-site")
    eval "$environment"
    set -- --package "$package"
else
    set --
fi
# stampede/ at the root is the package; its links lead to the other folders.
export PYTHONPATH="$root:$root/tests:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}"

mkdir -p "$(dirname "$out")"
"${PYTHON:-python3}" "$root/benchmarks/gpu/run.py" "$command" --out "$out" --began "$began" \
    "$@" ${GPU_OPTIONS:-}
