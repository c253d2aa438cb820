#!/usr/bin/env bash
# Path-X from labels alone, block-sparse, from the weights of Pathfinder-64 (`pathfinder64-labels.sh`); 14 minutes a run on one H200.
# START is the seed whose weights every run starts from. A run that is given more seconds goes on where it was stopped.
# Further arguments go to every run.
# Stamps are clipped, as in the records; `--data.task.init_args.resampling release` gives those of the release.
set -euo pipefail
# The preset averages the weights over 500 steps, which is long beside the 3,000 of a run.
presets=experiments/lra/presets common=$(mktemp)
sed 's/decay: 0.98/decay: 0.95/' $presets/curriculum/common.yaml >"$common"
for seed in ${SEEDS:-0 1 2}; do
  python -m experiments.lra.curriculum --output "runs/path-x-curriculum/seed$seed" --seed "$seed" --seconds "${SECONDS_A_RUN:-860}" \
    --patience 11 --stage easy:0.5:0.75:1400 --stage hard:0.5:2:3300 -- \
    --config $presets/common.yaml --config "$common" --config $presets/curriculum/path-x.yaml \
    --model.init_from "runs/pathfinder64-curriculum/seed${START:-0}/2-hard-0.5/checkpoints/best.ckpt" --data.batch_size 24 \
    --model.optimizer.learning_rate 3e-4 --model.optimizer.warmup_steps 150 --trainer.val_check_interval 250 \
    --data.task.init_args.sizes '[160000,960,4080]' --data.workers 14 \
    --data.task.init_args.resampling clipped "$@"
done
python -m experiments.lra.results path-x-labels runs/path-x-curriculum
