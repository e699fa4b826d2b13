#!/usr/bin/env bash
# Formats the Go code. With --check it only prints what would change, and fails.
source "$(dirname "$0")/lib.sh"
scripts/tool.sh golangci-lint

case ${1:-} in
--check) step "format" golangci-lint fmt --diff ;;
'') golangci-lint fmt ;;
*) die "usage: scripts/fmt.sh [--check]" ;;
esac
