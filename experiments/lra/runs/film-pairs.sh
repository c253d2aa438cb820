#!/usr/bin/env bash
# Film pairs, a stand-in for Retrieval: dense and block-sparse, 3 seeds each; 4 to 6 minutes a run on one H200.
# Needs `python -m experiments.lra.data film-pairs`. Further arguments go to every run.
set -euo pipefail
for attention in flash 'butterfly()'; do
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/film-pairs-${attention%()}" -- \
    --preset nystromformer/film-pairs --model.encoder.attention "$attention" --model.encoder.block_size 64 --data.workers 4 "$@"
done
python -m experiments.lra.results film-pairs runs/film-pairs-flash runs/film-pairs-butterfly
