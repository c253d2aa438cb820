#!/usr/bin/env bash
# Pathfinder-32 from labels alone, block-sparse, through stages of longer contours; 8 minutes a run on one H200.
# A run that is given more seconds goes on where it was stopped. Further arguments go to every run.
# Stamps are clipped, as in the records; `--data.task.init_args.resampling release` gives those of the release.
set -euo pipefail
for seed in ${SEEDS:-0 1 2}; do
  python -m experiments.lra.curriculum --output "runs/pathfinder32-curriculum/seed$seed" --seed "$seed" --seconds "${SECONDS_A_RUN:-530}" -- \
    --preset curriculum/pathfinder32 --model.optimizer.learning_rate 4e-4 --model.optimizer.warmup_steps 300 --data.workers 8 \
    --data.task.init_args.resampling clipped "$@"
done
python -m experiments.lra.results pathfinder32-labels runs/pathfinder32-curriculum
