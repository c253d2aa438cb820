#!/usr/bin/env bash
# Text (IMDb, bytes) under the Nystromformer protocol: dense and block-sparse, 3 seeds each; 2 to 3 minutes a run on one H200.
# Needs `python -m experiments.lra.data imdb`. Further arguments go to every run.
set -euo pipefail
for attention in flash 'butterfly()'; do
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/text-${attention%()}" -- \
    --preset nystromformer/text --model.encoder.attention "$attention" --model.encoder.block_size 64 --data.workers 4 "$@"
done
python -m experiments.lra.results text runs/text-flash runs/text-butterfly
