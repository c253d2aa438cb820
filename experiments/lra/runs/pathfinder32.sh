#!/usr/bin/env bash
# Pathfinder-32 with block-sparse attention: tiles with traced contours, with labels alone, and raster order.
# Further arguments go to every run.
set -euo pipefail
# Images with half of the distractors of the release, without a preferred direction and with clipped stamps, as on the day of these
# runs.
images=(--data.task.init_args.distractors described --data.task.init_args.directions any
  --data.task.init_args.resampling clipped)
traced=(--data.task.init_args.traced true --model.objective.traces 1 --model.objective.ink 4)
further=("$@")
rate=(--model.optimizer.learning_rate 1e-3 --model.optimizer.warmup_steps 500)
fit() {
  python -m experiments.lra.seeds --seeds 1 --output "runs/pathfinder32-$1" -- \
    --preset curriculum/pathfinder32 "${images[@]}" "${@:2}" "${further[@]}"
}
fit traced "${traced[@]}" "${rate[@]}" --trainer.max_steps 6600
fit labels "${rate[@]}" --model.optimizer.learning_rate 5e-4 --data.batch_size 128 --trainer.max_steps 6000
fit traced-raster "${traced[@]}" "${rate[@]}" --data.batch_size 128 --trainer.max_steps 6000 \
  --model.encoder.order raster --model.encoder.attention 'local(64) | butterfly()'
python -m experiments.lra.results pathfinder32 \
  runs/pathfinder32-traced runs/pathfinder32-labels runs/pathfinder32-traced-raster
