#!/usr/bin/env bash
# The curriculum with traced contours: Pathfinder-32, Path-64, Path-X, each from the best weights of the one before; the
# two larger on three devices, whose processes share a batch. Further arguments go to every run.
set -euo pipefail
# Images with half of the distractors of the release, without a preferred direction and with clipped stamps, as on the day of these
# runs.
images=(--data.task.init_args.distractors described --data.task.init_args.directions any
  --data.task.init_args.resampling clipped)
start=() further=("$@")
fit() {
  python -m experiments.lra.seeds --seeds 1 --output "runs/$1-traced" -- --preset "curriculum/$1" "${start[@]}" "${images[@]}" \
    --data.task.init_args.traced true --model.objective.traces 1 "${@:2}" "${further[@]}"
  start=(--model.init_from "runs/$1-traced/seed0/checkpoints/best.ckpt")
}
three=(--trainer.devices 3 --trainer.strategy ddp --model.optimizer.warmup_steps 300 --data.workers 15)
# The ink of larger images is a smaller part of them. Splits are multiples of the batch: one size to compile. The clock
# ended Path-64 at step 4,320.
fit pathfinder32 --model.objective.ink 4 --model.optimizer.learning_rate 1e-3 --model.optimizer.warmup_steps 500 \
  --trainer.max_steps 6600
fit pathfinder64 "${three[@]}" --model.objective.ink 6 --model.optimizer.learning_rate 1e-3 --data.batch_size 192 \
  --data.task.init_args.sizes '[160000,4224,20544]' --trainer.val_check_interval 500 --trainer.max_steps 5670
fit path-x "${three[@]}" --model.objective.ink 16 --model.optimizer.learning_rate 7e-4 --data.batch_size 48 \
  --data.task.init_args.sizes '[160000,2016,10272]' --trainer.val_check_interval 500 --trainer.max_steps 4290
python -m experiments.lra.results pathfinder64 runs/pathfinder64-traced
python -m experiments.lra.results path-x runs/path-x-traced
