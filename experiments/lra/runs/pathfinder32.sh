#!/usr/bin/env bash
# Pathfinder-32 with block-sparse attention: tiles, and raster order beside them.
set -euo pipefail
rate=(--model.optimizer.learning_rate 1e-3)
python -m experiments.lra.seeds --seeds 1 --output runs/pathfinder32-tiles -- \
  --preset curriculum/pathfinder32 "${rate[@]}"
python -m experiments.lra.seeds --seeds 1 --output runs/pathfinder32-raster -- \
  --preset curriculum/pathfinder32 "${rate[@]}" \
  --model.encoder.order raster --model.encoder.attention 'local(64) | butterfly()'
python -m experiments.lra.results pathfinder32 runs/pathfinder32-tiles runs/pathfinder32-raster
