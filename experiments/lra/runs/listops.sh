#!/usr/bin/env bash
# ListOps under the Nystromformer protocol: dense and block-sparse, 3 seeds each; 1 to 2 minutes a run on one H200.
# Further arguments go to every run.
set -euo pipefail
for attention in flash 'butterfly()'; do
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/listops-${attention%()}" -- \
    --preset nystromformer/listops --model.encoder.attention "$attention" --data.workers 4 "$@"
done
python -m experiments.lra.results listops runs/listops-flash runs/listops-butterfly
