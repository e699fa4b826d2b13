#!/usr/bin/env bash
# Builds bin/barchan and bin/barchan-agent, both static, with the version in them.
# With the argument failpoints it builds bin/barchan-failpoints instead, a server
# that tests can kill at points of their choice.
source "$(dirname "$0")/lib.sh"

version=$(git describe --tags --always --dirty 2>/dev/null || echo unknown)

compile() {
	CGO_ENABLED=0 go_build "build barchan" -buildvcs=false -trimpath -ldflags "-s -w -X main.version=$version" -o bin/ \
		./cmd/barchan-agent ./cmd/barchan
}

with_failpoints() {
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w -X main.version=$version" -tags failpoints \
		-o bin/barchan-failpoints ./cmd/barchan
}

mkdir -p bin
if [[ ${1:-} == failpoints ]]; then
	step "build barchan $version with failpoints" with_failpoints
	exit
fi
step "build barchan $version" compile
