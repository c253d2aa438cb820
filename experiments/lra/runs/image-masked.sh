#!/usr/bin/env bash
# Image with a larger model: first hidden pixels of its own training samples, then labels; beside it labels alone; block-sparse, and
# dense with the same steps. Needs `python -m experiments.lra.data cifar`. Further arguments go to every run.
set -euo pipefail
fit() {  # folder, preset, then options
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/$1" -- --preset "image/$2" "${@:3}"
}
for kind in sparse dense; do
  attention=()
  [ $kind = sparse ] || attention=(--model.encoder.attention flash)
  fit image-masked-$kind masked "${attention[@]}" "$@"
  fit image-tuned-$kind labels "${attention[@]}" --model.init_from "runs/image-masked-$kind/seed{seed}/checkpoints/best.ckpt" "$@"
done
fit image-labels-sparse labels "$@"
python -m experiments.lra.results image-masked runs/image-tuned-sparse runs/image-tuned-dense runs/image-labels-sparse
