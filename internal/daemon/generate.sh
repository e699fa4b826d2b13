#!/bin/sh
# Writes docs/metrics.md from the metrics themselves.
set -eu
cd "$(dirname "$0")"
go test -vet=off -count=1 -run '^TestMetricsReference$' . -update
