#!/usr/bin/env bash
# Runs all tests in random order under the race detector.
# Arguments go to `go test`.
#
# In CI, up to three tests that failed run once more, each alone; what passes only
# then is named at the end, to be mended. Data races, panics and what a whole
# package leaves behind are never tried again.
source "$(dirname "$0")/lib.sh"
scripts/tool.sh gotestsum pebble
# Only test/kube wants it, and it takes minutes to build the first time.
[[ " $* " == *" -short "* ]] || scripts/tool.sh kube-apiserver

# A package that failed without a test of its own having failed is one whose TestMain
# found something left over.
left_over() {
	awk '/"Action":"fail"/ {
			match($0, /"Package":"[^"]*"/)
			package = substr($0, RSTART + 11, RLENGTH - 12)
			if (/"Test":/) { tests[package] = 1 } else { failed[package] = 1 }
		}
		END { for (p in failed) if (!(p in tests)) { print p } }' "$1"
}

again=()
if [[ ${CI:-} == true ]]; then
	scratch=$(mktemp -d)
	again=(--rerun-fails=1 --rerun-fails-max-failures=3 --rerun-fails-run-root-test
		--rerun-fails-abort-on-data-race --rerun-fails-report="$scratch/again" --jsonfile="$scratch/json")
fi

# Two packages at once: tests of real sandboxes want the machine for themselves.
gotestsum --format=pkgname-and-test-fails --format-hide-empty-pkg --packages=./... "${again[@]}" -- \
	-race -shuffle=on -timeout=45m -p=2 "$@"

if ((${#again[@]})); then
	packages=$(left_over "$scratch/json")
	[[ -z $packages ]] || die "failed as a whole: $packages"
	[[ ! -s $scratch/again ]] || say "failed at first, passed alone, to be mended: $(cat "$scratch/again")"
fi

# What is there only in the server that tests can kill.
go test -race -tags failpoints ./internal/base/failpoint
