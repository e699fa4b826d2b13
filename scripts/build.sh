#!/usr/bin/env bash
# Builds bin/barchan and bin/barchan-agent, both static, with the version in them.
# release also builds the bench; images builds for each architecture, into bin/images. With another argument
# it builds a server for tests instead: failpoints builds bin/barchan-failpoints, which tests
# can kill at points of their choice, race builds bin/barchan-race, which reports data races, and ahead builds bin/barchan-ahead,
# whose clock is a minute ahead.
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

# with_clock_ahead compiles all with another time.Now, which takes minutes the first time.
with_clock_ahead() {
	local source scratch
	source=$(go env GOROOT)/src/time/time.go
	scratch=$(mktemp -d)
	sed 's/^\tsec, nsec, mono := runtimeNow()$/&\n\tsec += 60/' "$source" >"$scratch/time.go"
	[[ $(diff "$source" "$scratch/time.go" | grep -c '^>') == 1 ]] || die "time.Now of this Go is another than scripts/build.sh knows"
	printf '{"Replace": {"%s": "%s"}}' "$source" "$scratch/time.go" >"$scratch/overlay.json"
	go_build "build barchan-ahead" -overlay "$scratch/overlay.json" -buildvcs=false -ldflags "-s -w -X main.version=$version" -o bin/barchan-ahead ./cmd/barchan
	rm -rf "$scratch"
}

bench() {
	go build -buildvcs=false -ldflags "-s -w" -o bin/barchan-bench ./test/bench
}

mkdir -p bin
case ${1:-} in
failpoints) step "build barchan $version with failpoints" with_failpoints && exit ;;
ahead)
	only_one ahead
	step "build barchan $version with a clock that is ahead" with_clock_ahead
	exit
	;;
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
