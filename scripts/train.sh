#!/usr/bin/env bash
# Train: bash scripts/train.sh [task=speech] [strategy=hybrid] [trainer.devices=4] ...   (--help lists more)
# Makes the environment when it is missing. Outputs land in the directory the command is typed in.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$python" -m hybridtrain "$@"
