#!/usr/bin/env bash
# Measures the chapters of the bench that docs/figures.md and docs/growth.md show, and writes these pages and their pictures, which the
# commit of the pages has with the numbers. Arguments are those of test/bench, such as --quick and --note.
source "$(dirname "$0")/lib.sh"

scratch=$(mktemp -d)
scripts/bench.sh --only boot,create,claim,address,sleep,scale,memory,objects --json "$@" >"$scratch/report.json"
step "draw the figures" go -C tools/figures run . "$scratch/report.json" "$ROOT/docs"
