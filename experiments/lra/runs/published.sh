#!/usr/bin/env bash
# Text (IMDb, bytes), Image (grey CIFAR-10) and film pairs, a stand-in for Retrieval, or TASKS=text alone, under the Nystromformer
# protocol: dense and block-sparse, 3 seeds each; 2 to 6 minutes a run on one H200. Needs the data of
# `python -m experiments.lra.data imdb` (for film pairs of an archive with urls_*.txt), `cifar` and `film-pairs`. Further arguments go to every run.
set -euo pipefail
for task in ${TASKS:-text image film-pairs}; do
  for attention in flash 'butterfly()'; do
    python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/$task-${attention%()}" -- \
      --preset "nystromformer/$task" --model.encoder.attention "$attention" --model.encoder.block_size 64 --data.workers 4 "$@"
  done
  python -m experiments.lra.results "$task" "runs/$task-flash" "runs/$task-butterfly"
done
