#!/usr/bin/env bash
# The documentation as a site: bash scripts/site.sh [serve], then open build/site/index.html.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export NO_MKDOCS_2_WARNING=1
action=${1:-build}
exec "$python" -m mkdocs "$action" --quiet --config-file "$root/scripts/site/mkdocs.yml"
