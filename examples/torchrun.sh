#!/usr/bin/env bash
# Train under torchrun. On one machine, two ranks:
#
#     examples/torchrun.sh quickstart --parallel.tensor 2
#
# On several machines, run this on each of them with the same arguments:
#
#     RANKS_PER_NODE=8 NODES=2 RENDEZVOUS=node0:29400 examples/torchrun.sh run.toml
#
# The layout of the run (data_replicate x data_shard x context x tensor in [parallel]) must need
# RANKS_PER_NODE x NODES ranks. Arguments are those of `interlace train`, with checkpoints if they ask
# for them: --checkpoint.every 100 --checkpoint.resume latest.
set -euo pipefail

RANKS_PER_NODE="${RANKS_PER_NODE:-2}"
NODES="${NODES:-1}"

if [[ "$NODES" == 1 ]]; then
    where=(--standalone)
else
    where=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-id interlace
           --rdzv-endpoint "${RENDEZVOUS:?set RENDEZVOUS to HOST:PORT of one of the machines}")
fi

exec torchrun "${where[@]}" --nproc-per-node "$RANKS_PER_NODE" -m interlace train "$@"
