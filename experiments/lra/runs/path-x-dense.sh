#!/usr/bin/env bash
# Path-X from labels alone with dense attention, in the GPU time of `path-x-labels.sh`, which it is compared with; 8 minutes on one
# H200. Further arguments go to every run.
set -euo pipefail
presets=experiments/lra/presets common=$(mktemp)
sed 's/decay: 0.98/decay: 0.95/' $presets/curriculum/common.yaml >"$common"
python -m experiments.lra.curriculum --output runs/path-x-dense/seed0 --seconds "${SECONDS_A_RUN:-470}" --patience 11 \
  --stage easy:0.5:0.75:1400 --stage hard:0.5:2:8000 -- \
  --config $presets/common.yaml --config "$common" --config $presets/curriculum/path-x.yaml --model.encoder.attention flash \
  --model.init_from "runs/pathfinder64-curriculum/seed0/2-hard-0.5/checkpoints/best.ckpt" --data.batch_size 24 \
  --model.optimizer.learning_rate 3e-4 --model.optimizer.warmup_steps 150 --trainer.val_check_interval 125 \
  --data.task.init_args.sizes '[160000,960,4080]' --data.workers 14 "$@"
python -m experiments.lra.results path-x-dense runs/path-x-dense
