#!/usr/bin/env bash
# Image (grey CIFAR-10) under the Nystromformer protocol: dense and block-sparse, 3 seeds each; 2 to 4 minutes a run on one H200.
# Needs `python -m experiments.lra.data cifar`. Further arguments go to every run.
set -euo pipefail
for attention in flash 'butterfly()'; do
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/image-${attention%()}" -- \
    --preset nystromformer/image --model.encoder.attention "$attention" --model.encoder.block_size 64 --data.workers 4 "$@"
done
python -m experiments.lra.results image runs/image-flash runs/image-butterfly
