#!/usr/bin/env bash
# Path-X from labels alone, block-sparse and dense from the same weights of Pathfinder-64: 11 and 15 minutes on one H200.
# On several GPUs: COMMAND="torchrun --nproc-per-node 3 -m" path-x-dense.sh --trainer.devices 3 --trainer.strategy ddp
# Further arguments go to both runs.
# Stamps are clipped, as in the records; `--data.task.init_args.resampling release` gives those of the release.
set -euo pipefail
presets=experiments/lra/presets common=$(mktemp)
sed 's/decay: 0.98/decay: 0.95/' $presets/curriculum/common.yaml >"$common"
train() { # folder, seconds, steps on contours of 14 segments, then further arguments
  folder=$1 seconds=$2 steps=$3
  shift 3
  ${COMMAND:-python -m} experiments.lra.curriculum --output "runs/$folder/seed1" --seed 1 --seconds "$seconds" --patience 11 \
    --stage easy:0.5:0.75:1400 --stage "hard:0.5:2:$steps" -- \
    --config $presets/common.yaml --config "$common" --config $presets/curriculum/path-x.yaml \
    --model.init_from "runs/pathfinder64-curriculum/seed1/1-intermediate-0.5/checkpoints/best.ckpt" --data.batch_size 24 \
    --model.optimizer.learning_rate 3e-4 --model.optimizer.warmup_steps 150 --trainer.val_check_interval 125 \
    --data.task.init_args.sizes '[160000,960,4080]' --data.workers 14 \
    --data.task.init_args.resampling clipped "$@"
}
train path-x-curriculum 1200 3300 "$@"
train path-x-dense "${SECONDS_A_RUN:-890}" 8000 --model.encoder.attention flash "$@"
python -m experiments.lra.results path-x-dense runs/path-x-dense runs/path-x-curriculum
