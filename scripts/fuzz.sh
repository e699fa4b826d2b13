#!/usr/bin/env bash
# Gives each parser of external input generated inputs, and says how long it took.
#
#   scripts/fuzz.sh [INPUTS] [PATTERN]
#
# INPUTS is a number for each target, by default 1000000. PATTERN selects targets by DIRECTORY/FuzzNAME. An input that fails
# is written below testdata/fuzz of its package, and is one of the inputs of make test from then on.
source "$(dirname "$0")/lib.sh"
inputs=${1:-1000000} pattern=${2:-.}
[[ $inputs =~ ^[1-9][0-9]*$ ]] || die "INPUTS: '$inputs' is not a number of 1 or more"
mapfile -t targets < <(git grep -o '^func Fuzz[A-Za-z0-9]*' -- '*_test.go' | sed -E 's#/[^/]*:func #/#' | sort -u | grep -E -- "$pattern")
((${#targets[@]})) || die "PATTERN: no target matches '$pattern'"

out=$(mktemp)
trap 'rm -f "$out"' EXIT
failed=()
for target in "${targets[@]}"; do
	began=$SECONDS
	# Without a bound, each input that reaches new code is made smaller for up to a minute, which is most of the time.
	if go test -vet=off -fuzzminimizetime=100x -run='^$' -fuzz="^${target##*/}\$" -fuzztime="${inputs}x" "./${target%/*}" >"$out" 2>&1; then
		say "$target: $inputs inputs in $((SECONDS - began)) s"
	else
		cat "$out"
		failed+=("$target")
	fi
done
((${#failed[@]} == 0)) || die "failed: ${failed[*]}"
