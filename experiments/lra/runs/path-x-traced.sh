#!/usr/bin/env bash
# Path-X with contour labels, block-sparse, on images by the rules of the release, from the weights of Pathfinder-64 with labels alone
# (`pathfinder64-labels.sh`); 14 minutes on one H200. `path-x.sh` is the same on easier images. START is the seed whose weights it starts
# from. A run that is given more seconds goes on where it was stopped. Further arguments go to the run.
# Stamps are clipped, as in the records; `--data.task.init_args.resampling release` gives those of the release.
set -euo pipefail
seed=${SEED:-0}
python -m experiments.lra.curriculum --output "runs/path-x-traced-release/seed$seed" --seed "$seed" --seconds "${SECONDS_A_RUN:-860}" \
  --patience 11 --stage easy:0.5:0.9:1400 --stage hard:0.5:2:3300 -- \
  --preset curriculum/path-x --data.task.init_args.traced true --model.objective.traces 1 --model.objective.ink 16 \
  --model.init_from "runs/pathfinder64-curriculum/seed${START:-0}/2-hard-0.5/checkpoints/best.ckpt" --data.batch_size 24 \
  --model.optimizer.learning_rate 3e-4 --model.optimizer.warmup_steps 150 --trainer.val_check_interval 250 \
  --data.task.init_args.sizes '[160000,960,4080]' --data.workers 14 \
  --data.task.init_args.resampling clipped "$@"
python -m experiments.lra.results path-x-traced runs/path-x-traced-release
