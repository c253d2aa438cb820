#!/usr/bin/env bash
# Path-256 from labels alone, block-sparse, from the weights of Path-X (`path-x-labels.sh`): 65,536 tokens, 58 images/s on one H200.
# A run that is given more seconds goes on where it was stopped. Further arguments go to every run.
set -euo pipefail
python -m experiments.lra.curriculum --output runs/path-256-curriculum/seed0 --seconds "${SECONDS_A_RUN:-3600}" \
  --stage easy:0.5:0.75:4000 --stage hard:0.5:2:30000 -- --preset curriculum/path-256 \
  --model.init_from "runs/path-x-curriculum/seed0/1-hard-0.5/checkpoints/best.ckpt" \
  --model.optimizer.learning_rate 2e-4 --model.optimizer.warmup_steps 200 \
  --data.task.init_args.sizes '[160000,1024,4096]' --data.workers 14 "$@"
python -m experiments.lra.results path-256-labels runs/path-256-curriculum
