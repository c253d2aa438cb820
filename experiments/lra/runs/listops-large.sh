#!/usr/bin/env bash
# A larger model of ListOps: first short expressions, then those of the arena, then more of them; 3 seeds, each from its own weights;
# 12 minutes a seed on one H200. Further arguments go to every run.
set -euo pipefail
fit() {  # folder, preset, then options
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/$1" -- --preset "$2" "${@:3}"
}
fit listops-large-short listops/short "$@"
fit listops-large listops/arena --model.init_from 'runs/listops-large-short/seed{seed}/checkpoints/best.ckpt' "$@"
fit listops-large-more listops/arena --model.init_from 'runs/listops-large/seed{seed}/checkpoints/best.ckpt' --trainer.max_steps 5000 "$@"
python -m experiments.lra.results listops-large runs/listops-large runs/listops-large-more
