#!/bin/sh
# Type the same on every host: torchrun.sh FIRST_HOST CONFIG.yaml [section.key=value ...]
set -eu
first=$1
shift
# 1:2 would go on with one host while the other is away; the batch size is global, so training
# means the same. RANKS: GPUs of a host, or on CPUs one or two processes.
exec torchrun --nnodes "${NODES:-2}" --nproc_per_node "${RANKS:-1}" --max-restarts 3 \
    --rdzv_backend c10d --rdzv_endpoint "$first:29500" -m stampede train "$@"
