#!/usr/bin/env bash
# Film pairs with both reviews in one document, so that attention compares their bytes: first hidden bytes of training pairs, then
# labels; half of the heads block-sparse, and dense with the same steps. Needs the data of
# `python -m experiments.lra.data imdb` and `film-pairs`. Further arguments go to every run.
set -euo pipefail
fit() {  # folder, preset, then options
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/$1" -- --preset "$2" "${@:3}"
}
for kind in sparse dense; do
  attention=()
  [ $kind = sparse ] || attention=(--model.encoder.attention flash)
  start=(--model.init_from "runs/film-pairs-joined-masked-$kind/seed{seed}/checkpoints/best.ckpt")
  fit "film-pairs-joined-masked-$kind" text/film-pairs-joined/masked "${attention[@]}" "$@"
  fit "film-pairs-joined-$kind" text/film-pairs-joined/labels "${attention[@]}" "${start[@]}" "$@"
done
python -m experiments.lra.results film-pairs-joined runs/film-pairs-joined-{sparse,dense}
