#!/usr/bin/env bash
# DistBelief's comparison in small: bash scripts/distbelief.sh [DIR] [MINUTES]   (default outputs/distbelief, 3)
# Sandblaster L-BFGS, Downpour with Adagrad and hybrid with Adam, 2 workers and so many minutes each: on digits, and on
# a DeepSpeech 64 wide. Makes DIR/digits/comparison.html and DIR/speech/comparison.html: loss against time on one page.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
out=$(realpath -m "${1:-outputs/distbelief}") minutes=$(printf %02d "${2:-3}")
digits="task=digits"
speech="experiment=quick model.net.dropout=0 data.augment=null data.train=800 trainer.gradient_clip_val=null" # no chance in it
for task in digits speech; do
  run() { # NAME [option ...]: one run
    "$python" -m hybridtrain ${!task} trainer.devices=2 trainer.max_epochs=-1 "trainer.max_time=00:00:$minutes:00" \
      test=false advice=false "hydra.run.dir=$out/$task/$1" "${@:2}"
  }
  run sandblaster strategy=sandblaster
  run downpour strategy=downpour optimizer=adagrad optimizer.lr=0.02
  run hybrid strategy=hybrid
  "$python" -m hybridtrain compare "$out/$task"
done
