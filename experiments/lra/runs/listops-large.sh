#!/usr/bin/env bash
# A larger model of ListOps: first short expressions, then those of the arena, then more of them.
set -euo pipefail
python -m experiments.lra.seeds --seeds 1 --output runs/listops-large-short -- --preset listops/short
start=$(find runs/listops-large-short -name best.ckpt)
python -m experiments.lra.seeds --seeds 1 --output runs/listops-large -- \
  --preset listops/arena --model.init_from "$start"
longer=$(find runs/listops-large -name best.ckpt)
python -m experiments.lra.seeds --seeds 1 --output runs/listops-large-more -- \
  --preset listops/arena --model.init_from "$longer" --trainer.max_steps 5000
python -m experiments.lra.results listops-large runs/listops-large runs/listops-large-more
