#!/usr/bin/env bash
# The curriculum: Pathfinder-32, then 64, then Path-X, each from the best weights of the one before.
set -euo pipefail
start=()
for size in pathfinder32 pathfinder64 path-x; do
  python -m experiments.lra.seeds --seeds 1 --restarts 3 --output "runs/$size" -- \
    --preset "curriculum/$size" "${start[@]}"
  best=$(find "runs/$size" -name best.ckpt -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
  start=(--model.init_from "$best")
done
