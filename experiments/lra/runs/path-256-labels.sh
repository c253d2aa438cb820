#!/usr/bin/env bash
# Path-256 from labels alone, block-sparse, from the weights of Path-X (`path-x-labels.sh`): 65,536 tokens, 10 minutes on two H200.
# On several GPUs: COMMAND="torchrun --nproc-per-node 2 -m" path-256-labels.sh --trainer.devices 2 --trainer.strategy ddp
# Segments and gaps are as long as those of Path-X: tiles of the same size, as many to each side, where the preset takes fewer keys.
# A run that is given more seconds goes on where it was stopped. Further arguments go to the run.
# Stamps are clipped, as in the records; `--data.task.init_args.resampling release` gives those of the release.
set -euo pipefail
# The preset averages the weights over 500 steps; see path-x-labels.sh.
presets=experiments/lra/presets common=$(mktemp)
sed 's/decay: 0.98/decay: 0.95/' $presets/curriculum/common.yaml >"$common"
seed=${SEED:-0}
${COMMAND:-python -m} experiments.lra.curriculum --output "runs/path-256-curriculum/seed$seed" --seed "$seed" --seconds "${SECONDS_A_RUN:-3600}" \
  --stage easy:0.5:0.75:1000 --stage hard:0.5:2:7000 -- \
  --config $presets/common.yaml --config "$common" --config $presets/curriculum/path-256.yaml \
  --model.encoder.attention 'neighborhood2d(32, 3) | butterfly() | global_tokens(256)' --model.encoder.block_size 64 --model.encoder.tile '[8,8]' \
  --model.init_from "runs/path-x-curriculum/seed$seed/1-hard-0.5/checkpoints/best.ckpt" \
  --model.optimizer.learning_rate 3e-4 --model.optimizer.warmup_steps 100 --trainer.val_check_interval 350 \
  --data.task.init_args.sizes '[160000,512,2048]' --data.workers 14 \
  --data.task.init_args.resampling clipped "$@"
python -m experiments.lra.results path-256-labels runs/path-256-curriculum
