#!/usr/bin/env bash
# Runs all tests in random order under the race detector.
# Arguments go to `go test`.
source "$(dirname "$0")/lib.sh"
scripts/tool.sh gotestsum
# Only test/kube wants it, and it takes minutes to build the first time.
[[ " $* " == *" -short "* ]] || scripts/tool.sh kube-apiserver

# Two packages at once: tests of real sandboxes want the machine for themselves.
gotestsum --format=pkgname-and-test-fails --format-hide-empty-pkg -- \
	-race -shuffle=on -timeout=30m -p=2 "$@" ./...
