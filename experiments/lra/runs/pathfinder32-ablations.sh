#!/usr/bin/env bash
# What the curriculum of Pathfinder-32 with labels alone needs: mean pooling, easier images, no curriculum and raster order, each
# beside `pathfinder32-labels.sh`; 6 to 8 minutes a run on one GPU. The first three stages are as short as the seeds of that script
# needed them, so that a run reaches the contours of the arena. Further arguments go to every run.
# Stamps are clipped, as in the records; `--data.task.init_args.resampling release` gives those of the release.
set -euo pipefail
train() {  # folder, then stages or options
  python -m experiments.lra.curriculum --output "runs/$1/seed0" --seconds "${SECONDS_A_RUN:-530}" "${stages[@]}" -- \
    --preset curriculum/pathfinder32 --model.optimizer.learning_rate 4e-4 --model.optimizer.warmup_steps 300 --data.workers 8 \
    --data.task.init_args.resampling clipped "${@:2}"
}
stages=(--stage easy:1:0.85:2000 --stage easy:0.5:0.93:2000 --stage intermediate:0.5:0.9:750 --stage hard:0.5:2:12000)
train pathfinder32-mean --model.encoder.pool mean "$@"
train pathfinder32-raster --model.encoder.order raster --model.encoder.attention 'local(64) | butterfly()' "$@"
train pathfinder32-easier --data.task.init_args.distractors described --data.task.init_args.directions any "$@"
stages=(--stage hard:0:2:12000)
train pathfinder32-at-once "$@"
python -m experiments.lra.results pathfinder32-ablations runs/pathfinder32-{mean,raster,at-once}
python -m experiments.lra.results pathfinder32-labels-easier runs/pathfinder32-easier
