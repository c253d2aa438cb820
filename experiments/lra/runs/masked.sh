#!/usr/bin/env bash
# Text and Image (or TASKS=image alone) with larger models: first hidden bytes or pixels of their own training samples, then
# labels; beside it labels alone; block-sparse, and dense with the same steps. Needs the data of
# `python -m experiments.lra.data imdb` and `cifar`. Further arguments go to every run.
set -euo pipefail
for task in ${TASKS:-text image}; do
  fit() {  # folder, preset, then options
    python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/$task-$1" -- --preset "$task/$2" "${@:3}"
  }
  for kind in sparse dense; do
    attention=()
    [ $kind = sparse ] || attention=(--model.encoder.attention flash)
    fit masked-$kind masked "${attention[@]}" "$@"
    fit tuned-$kind labels "${attention[@]}" --model.init_from "runs/$task-masked-$kind/seed{seed}/checkpoints/best.ckpt" "$@"
    fit labels-$kind labels "${attention[@]}" "$@"
  done
  python -m experiments.lra.results "$task-masked" "runs/$task-tuned-"{sparse,dense}
  python -m experiments.lra.results "$task-labels" "runs/$task-labels-"{sparse,dense}
done
