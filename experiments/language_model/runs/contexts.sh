#!/usr/bin/env bash
# What a longer context is worth, and what block-sparse patterns keep of it: 25M parameters, some 500 MB of text read by each run,
# or with `large` 124M parameters and 94 MB, of which three runs are trained.
# One H200, in pieces of ten minutes: repeat the command until it says that all runs have ended.
# Runs of more than 1K tokens of context read sequences of 1K in the first 60 % of their steps: without this, 16K is
# above 1K after 197 MB (record language-model-25m-contexts).
#     experiments/language_model/runs/contexts.sh CLONE_OF_BOOKS [SECONDS] [bytes|tokens|large] [RUN...]
# By default a token is a byte; with `tokens` it is one of byte-level BPE, of some four bytes, and runs have a quarter of the steps.
# Names of runs, such as dense-16k, select these; without a name all are trained.
set -euo pipefail
books=$1
end=$((SECONDS + ${2:-540}))
kind=${3:-bytes} size=25m
chosen=("${@:4}")
for name in "${chosen[@]}"; do
  grep -q "^run $name " "$0" || { echo "run must be one of $(grep -oP '^run \K\S+' "$0" | xargs), got $name" >&2 && exit 2; }
done
folders=()
[ -e data/books/books.json ] || python -m experiments.language_model data "$books"
case $kind in
  bytes) given=(--steps 3800) short=2280 runs=runs/language-model record=25m-warm-up ;;
  tokens)
    [ -e data/books-tokens/books.json ] || python -m experiments.language_model tokenize
    given=(--steps 1000 --every 125 --data data/books-tokens) short=600 runs=runs/language-model-tokens record=25m-warm-up-tokens
    ;;
  large)
    size=124m given=(--steps 720 --every 120) short=432 runs=runs/language-model-124m record=124m-warm-up
    if [ ${#chosen[@]} = 0 ]; then chosen=(dense-1k dense-16k mid-16k); fi
    ;;
  *) echo "runs must be bytes, tokens or large, got $kind" >&2 && exit 2 ;;
esac
run() {
  name=$1
  preset=$size-$2
  shift 2
  if [ ${#chosen[@]} -gt 0 ] && [[ " ${chosen[*]} " != *" $name "* ]]; then return; fi
  folders+=("$runs/$name")
  if grep -qs '"ended": true' "$runs/$name/result.json"; then return; fi
  warm_up=(--short-context 1024 --short-steps "$short")
  if [ "$preset" = "$size-1k" ]; then warm_up=(); fi
  left=$((end - SECONDS))
  if [ "$left" -lt 90 ]; then exit; fi
  python -m experiments.language_model train "$preset" --output "$runs/$name" --compile "${given[@]}" "${warm_up[@]}" --seconds "$left" "$@"
}
run dense-1k 1k
run dense-4k 4k
run dense-16k 16k
# 1/3.6, 1/5.8 and 1/8 of the blocks of the causal mask at 16K tokens.
run wide-16k 16k --attention "local(2048) | butterfly() | global_tokens(128)"
run mid-16k 16k --attention "local(1024) | butterfly() | global_tokens(128)"
run mid-16k-seed-1 16k --attention "local(1024) | butterfly() | global_tokens(128)" --seed 1
run narrow-16k 16k --attention "local(512) | butterfly() | global_tokens(128)"
# In every second layer one of eight heads attends all tokens before, the others a window: 1/8 of the blocks.
window="local(256) | global_tokens(128)"
run hybrid-16k 16k --attention "full(); $window; $window; $window; $window; $window; $window; $window" --attention "$window"
# 1/9 of the blocks.
run heads-16k 16k --attention "local(1024); butterfly() | global_tokens(128)"
run narrow-64k 64k --attention "local(512) | butterfly() | global_tokens(128)"
run dense-64k 64k
python -m experiments.language_model record "$record" "${folders[@]}"
echo "all runs have ended"
