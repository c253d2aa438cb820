#!/usr/bin/env bash
# Text with a larger model: first hidden bytes of its own training samples, then labels; beside it labels alone; block-sparse, and
# dense with the same steps. Needs `python -m experiments.lra.data imdb`. Further arguments go to every run.
set -euo pipefail
fit() {  # folder, preset, then options
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/$1" -- --preset "text/$2" "${@:3}"
}
for kind in sparse dense; do
  attention=()
  [ $kind = sparse ] || attention=(--model.encoder.attention flash)
  fit text-masked-$kind masked "${attention[@]}" "$@"
  fit text-tuned-$kind labels "${attention[@]}" --model.init_from "runs/text-masked-$kind/seed{seed}/checkpoints/best.ckpt" "$@"
done
fit text-labels-sparse labels "$@"
python -m experiments.lra.results text-masked runs/text-tuned-sparse runs/text-tuned-dense runs/text-labels-sparse
