#!/usr/bin/env bash
# Builds bin/barchan and bin/barchan-agent, both static, with the version in them.
# release also builds the bench; images builds for each architecture, into bin/images. With another argument
# it builds a server for tests instead: failpoints builds bin/barchan-failpoints, which tests
# can kill at points of their choice, and race builds bin/barchan-race, which reports data races.
# bench builds bin/barchan-bench, which `barchan bench` runs.
source "$(dirname "$0")/lib.sh"

version=$(git describe --tags --always --dirty 2>/dev/null || echo unknown)

# compile DIRECTORY builds the programs into a directory.
compile() {
	go_build "build barchan" -buildvcs=false -ldflags "-s -w -X main.version=$version" -o "$1" \
		./cmd/barchan-agent ./cmd/barchan
}

with_failpoints() {
	go build -buildvcs=false -ldflags "-s -w -X main.version=$version" -tags failpoints \
		-o bin/barchan-failpoints ./cmd/barchan
}

with_race_detector() {
	CGO_ENABLED=1 go build -buildvcs=false -ldflags "-X main.version=$version" -race -o bin/barchan-race ./cmd/barchan
}

bench() {
	go build -buildvcs=false -ldflags "-s -w" -o bin/barchan-bench ./test/bench
}

mkdir -p bin
case ${1:-} in
failpoints) step "build barchan $version with failpoints" with_failpoints && exit ;;
race)
	only_one race # it compiles for minutes what another run would compile too
	step "build barchan $version with the race detector" with_race_detector
	exit
	;;
images)
	for GOARCH in amd64 arm64; do
		export GOARCH
		mkdir -p "bin/images/$GOARCH"
		step "build barchan $version for $GOARCH" compile "bin/images/$GOARCH/"
	done
	exit
	;;
bench) bench && exit ;;
release)
	step "build barchan $version" compile bin/
	step "build the bench" bench
	exit
	;;
esac
step "build barchan $version" compile bin/
