#!/usr/bin/env bash
# Text and Image (or TASKS=image alone) with larger models: first hidden bytes or pixels of their own training samples, then
# labels; beside it labels alone; block-sparse, and dense with the same steps. Film pairs start from the weights of Text. Needs the
# data of `python -m experiments.lra.data imdb`, `cifar` and `film-pairs`. Further arguments go to every run.
set -euo pipefail
fit() {  # folder, preset, then options
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/$1" -- --preset "$2" "${@:3}"
}
for task in ${TASKS:-text image}; do
  for kind in sparse dense; do
    attention=()
    [ $kind = sparse ] || attention=(--model.encoder.attention flash)
    start=(--model.init_from "runs/$task-masked-$kind/seed{seed}/checkpoints/best.ckpt")
    fit "$task-masked-$kind" "$task/masked" "${attention[@]}" "$@"
    fit "$task-tuned-$kind" "$task/labels" "${attention[@]}" "${start[@]}" "$@"
    fit "$task-labels-$kind" "$task/labels" "${attention[@]}" "$@"
    [ "$task" = image ] || fit "film-pairs-tuned-$kind" text/film-pairs "${attention[@]}" "${start[@]}" "$@"
  done
  python -m experiments.lra.results "$task-masked" "runs/$task-tuned-"{sparse,dense}
  python -m experiments.lra.results "$task-labels" "runs/$task-labels-"{sparse,dense}
  [ "$task" = image ] || python -m experiments.lra.results film-pairs-masked runs/film-pairs-tuned-{sparse,dense}
done
