#!/bin/sh
# Writes kinds.md and rest.md, which the code determines.
set -eu
cd "$(dirname "$0")"
go run reference.go
