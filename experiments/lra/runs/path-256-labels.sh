#!/usr/bin/env bash
# Path-256 from labels alone, block-sparse, from the weights of Path-X (`path-x-labels.sh`): 65,536 tokens, half an hour on one H200.
# Segments and gaps are as long as those of Path-X: tiles of the same size, as many to each side, where the preset takes fewer keys.
# A run that is given more seconds goes on where it was stopped. Further arguments go to every run.
set -euo pipefail
python -m experiments.lra.curriculum --output runs/path-256-curriculum/seed0 --seconds "${SECONDS_A_RUN:-3600}" \
  --stage easy:0.5:0.75:1000 --stage hard:0.5:2:4000 -- --preset curriculum/path-256 \
  --model.encoder.attention 'neighborhood2d(32, 3) | butterfly() | global_tokens(256)' --model.encoder.block_size 64 --model.encoder.tile '[8,8]' \
  --model.init_from "runs/path-x-curriculum/seed0/1-hard-0.5/checkpoints/best.ckpt" \
  --model.optimizer.learning_rate 3e-4 --model.optimizer.warmup_steps 100 --trainer.val_check_interval 200 \
  --data.task.init_args.sizes '[160000,512,2048]' --data.workers 14 "$@"
python -m experiments.lra.results path-256-labels runs/path-256-curriculum
