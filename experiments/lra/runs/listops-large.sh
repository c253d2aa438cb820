#!/usr/bin/env bash
# A larger model of ListOps: first short expressions, then those of the arena, then more of them; 3 seeds, each from its own weights.
# Further arguments go to every run.
set -euo pipefail
for seed in ${SEEDS:-0 1 2}; do
  start=()
  fit() {
    python -m experiments.lra fit --preset "$2" --seed_everything "$seed" --trainer.default_root_dir "runs/$1/seed$seed" "${start[@]}" "${@:3}"
    start=(--model.init_from "$(find "runs/$1/seed$seed" -name best.ckpt)")
  }
  fit listops-large-short listops/short "$@"
  fit listops-large listops/arena "$@"
  fit listops-large-more listops/arena --trainer.max_steps 5000 "$@"
done
python -m experiments.lra.results listops-large runs/listops-large runs/listops-large-more
