#!/usr/bin/env bash
# Builds bin/barchan and bin/barchan-agent, both static, with the version in them.
source "$(dirname "$0")/lib.sh"

version=$(git describe --tags --always --dirty 2>/dev/null || echo unknown)

compile() {
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w -X main.version=$version" -o bin/ \
		./cmd/barchan ./cmd/barchan-agent
}

mkdir -p bin
step "build barchan $version" compile
