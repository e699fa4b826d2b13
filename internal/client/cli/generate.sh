#!/bin/sh
# Writes docs/cli.md from the commands themselves.
set -eu
cd "$(dirname "$0")"
mkdir -p ../../../docs
go test -vet=off -count=1 -run '^TestDocsAreFresh$' . -update
