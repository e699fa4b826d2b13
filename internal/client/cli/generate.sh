#!/bin/sh
# Writes docs/cli.md from the commands themselves.
set -eu
cd "$(dirname "$0")"
mkdir -p ../../../docs
go test -count=1 -run '^TestDocsAreFresh$' . -update
