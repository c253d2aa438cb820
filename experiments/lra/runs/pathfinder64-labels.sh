#!/usr/bin/env bash
# Pathfinder-64 from labels alone, block-sparse, from the weights of Pathfinder-32 (`pathfinder32-labels.sh`); 7 minutes a run on one H200.
# START is the seed whose weights every run starts from.
# Stamps are clipped, as in the records; `--data.task.init_args.resampling release` gives those of the release.
set -euo pipefail
for seed in ${SEEDS:-0 1 2}; do
  python -m experiments.lra.curriculum --output "runs/pathfinder64-curriculum/seed$seed" --seed "$seed" --seconds "${SECONDS_A_RUN:-418}" \
    --stage easy:0.5:0.85:1500 --stage intermediate:0.5:0.85:2500 --stage hard:0.5:2:12000 -- \
    --preset curriculum/pathfinder64 --model.init_from "runs/pathfinder32-curriculum/seed${START:-1}/3-hard-0.5/checkpoints/best.ckpt" \
    --model.optimizer.learning_rate 3e-4 --model.optimizer.warmup_steps 200 \
    --data.task.init_args.sizes '[160000,2048,8192]' --data.workers 16 \
    --data.task.init_args.resampling clipped "$@"
done
python -m experiments.lra.results pathfinder64-labels runs/pathfinder64-curriculum
