#!/usr/bin/env bash
# Runs tests, in random order in CI, and prints the ten slowest.
#
#   scripts/test.sh [--all|--kube] [ARGUMENT OF go test...]
#
# Without --all it leaves out most of the crash matrix, the soak, partitions, kube-apiserver,
# and the race detector, which multiplies the time. With --kube it runs the tests that need a
# Kubernetes, and these alone. Of those --all has a part, from the installation in a cluster with a kubelet to its
# purge, and the tutorial of clusters, and it asks for thousands of sandboxes, unless PKG or RUN is set.
# PKG names packages (default ./...), RUN is a pattern of tests.
#
# With none of these, tests of real sandboxes begin until TEST_UNTIL (seconds since 1970; default: eight minutes from now, but
# at least four after all others). What is skipped then, in random order, is counted at the end; a fast machine has time for all.
#
# With SHARE_UNTIL (seconds since 1970) they are followed by one share of what only --all and --kube have, another one each hour, or
# the one that SHARE names. It begins if ten minutes are left, and is stopped at SHARE_UNTIL; that is no failure.
#
# In CI, up to three tests that failed run once more, each alone; what passes only
# then is named at the end, to be mended. Data races, panics and what a whole
# package leaves behind are never tried again.
source "$(dirname "$0")/lib.sh"
# What the shell has set for another server, as `eval "$(barchan env)"` does, is not for those of the tests.
for variable in "${!BARCHAN_@}" "${!E2B_@}" KUBECONFIG; do
	[[ $variable == BARCHAN_CACHE || $variable == BARCHAN_SCREENSHOTS ]] || unset "$variable"
done
scripts/tool.sh gotestsum pebble s3-server nfs-server
export TEST_PART=fast
race=()
if [[ ${1:-} == --kube ]]; then
	shift
	TEST_PART=kube
	PKG=${PKG:-./test/kube/...}
	scripts/tool.sh kubernetes kube-apiserver-oldest helm kwok agent-sandbox-{controller,client,e2e,e2e-extensions}
elif [[ ${1:-} == --all ]]; then
	shift
	TEST_PART=all
	race=(-race)
	# make test leaves out the tests that need them; each takes minutes to build the first time.
	scripts/tool.sh kube-apiserver otelcol
fi

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

scratch=$(mktemp -d)
again=()
if [[ ${CI:-} == true ]]; then
	again=(--rerun-fails=1 --rerun-fails-max-failures=3 --rerun-fails-run-root-test
		--rerun-fails-abort-on-data-race --rerun-fails-report=REPORT)
fi

# run NAME PACKAGES FLAG... tests packages. Tests of real sandboxes load the machine: beside more than two of a package and
# two packages, on two processors, all take many times as long, and what they wait for comes too late. make check has vet look
# at our code; go test would have it look at all that the code imports too.
run() {
	local name=$1 packages=$2 format=pkgname-and-test-fails
	shift 2
	[[ " $* " != *" -v "* ]] || format=standard-verbose
	[[ " $* " != *" -race "* ]] || export CGO_ENABLED=1
	${limit:+timeout --signal=INT --kill-after=60 "$limit"} gotestsum --format="$format" --format-hide-empty-pkg --packages="$packages" --jsonfile="$scratch/$name.json" "${again[@]/REPORT/$scratch/$name.again}" -- \
		-vet=off -shuffle="$shuffle" -timeout=90m -parallel=2 ${RUN:+-run="$RUN"} "$@"
}

# compile_race compiles the server and all packages and tests, and links only the server.
compile_race() {
	scripts/build.sh race
	# shellcheck disable=SC2086 # they are words
	CGO_ENABLED=1 go list -race -test -deps -export $packages >/dev/null
}

# run_cluster FLAG... runs the part of the tests of a whole cluster that takes a few minutes.
run_cluster() {
	scripts/tool.sh kubernetes || return
	TEST_PART=kube run cluster ./test/kube/cluster -p=1 \
		-run='^(TestSandboxes|TestTutorial)$/^(doctor|pool and claim|peers|tokens of the cluster|purge)$' "$@"
}

# run_share FLAG... runs the share of this hour. The tests below a folder are those of its packages, with the race detector.
run_share() {
	local shares=(cluster test/kube internal/control internal/edge internal/node "internal/guest internal/daemon internal/base internal/client")
	local share=${SHARE:-${shares[EPOCHSECONDS / 3600 % ${#shares[@]}]}} limit=$((SHARE_UNTIL - EPOCHSECONDS)) result=0
	export TEST_UNTIL=$((SHARE_UNTIL - 180))
	if ((limit < 600)); then
		say "no time is left for a share of make test-all and make test-kube"
		return
	fi
	say "a share of make test-all and make test-kube: $share, for up to $((limit / 60)) minutes"
	# shellcheck disable=SC2086 # they are words
	case $share in
	cluster) timeout $((limit - 300)) scripts/tool.sh kubernetes && limit=$((SHARE_UNTIL - EPOCHSECONDS)) run_cluster "$@" ;;
	test/kube) timeout $((limit - 300)) scripts/tool.sh kube-apiserver && limit=$((SHARE_UNTIL - EPOCHSECONDS)) TEST_PART=all run share ./test/kube -p=1 "$@" ;;
	*) run share "$(printf './%s/... ' $share)" -p=2 -race "$@" ;;
	esac || result=$?
	((result == 124 || result == 137)) || return "$result"
	say "the share was stopped, as no time is left"
	! grep -q -- '--- FAIL: ' "$scratch/share.json" "$scratch/cluster.json" 2>/dev/null || return 1
	rm -f "$scratch"/{share,cluster}.json # they have packages that were stopped
}

# run_crowd FLAG... asks for thousands of sandboxes, which takes minutes with the race detector.
run_crowd() { TEST_PART=crowd run crowd ./internal/edge/e2b -run='^TestCrowd$' "$@"; }

status=0 shuffle=on limit=''
if [[ -n ${PKG:-} ]]; then
	run all "$PKG" -p=2 "${race[@]}" "$@" || status=$?
elif ((${#race[@]} == 0)); then
	until=$((EPOCHSECONDS + 480))
	packages=$(go list ./... | grep -vE '/(test/e2e|internal/node)$' | tr '\n' ' ')
	# Outside CI, Go repeats no test of a package that is as it was; that takes tests in their order.
	[[ ${CI:-} == true ]] || shuffle=off
	# A test that hangs must not take the time of all.
	run packages "$packages" -p=3 -timeout=10m "$@" || status=$?
	scripts/build.sh failpoints # the tests need it, and compilers would slow down their sandboxes
	# The tests of real sandboxes have the time that is left after the others.
	shuffle=on
	((until > EPOCHSECONDS + 240)) || until=$((EPOCHSECONDS + 240))
	export TEST_UNTIL=${TEST_UNTIL:-$until}
	run sandboxes "./test/e2e ./internal/node" -p=2 -count=1 -timeout=40m "$@" || status=$?
	[[ -z ${SHARE_UNTIL:-} ]] || run_share "$@" || status=$?
else
	# The tests below test/ are clients: of servers, some of which are built with the race detector, and of controllers that
	# run under it where they are. They take as long as all others together.
	# The longest of them come first.
	# They end before the others, so that a cluster has its turn after them.
	# Before, all is compiled that they share, once: compilers would slow down the servers, and what the tests expect of them.
	packages=$(go list ./... | grep -v '/test/' | tr '\n' ' ')
	step "compile all with the race detector" compile_race
	{
		run servers ./test/... -p=1 -shuffle=off "$@" || status=$?
		[[ -n ${RUN:-} ]] || run_crowd "$@" || status=$?
		[[ -n ${RUN:-} ]] || run_cluster "$@" || status=$?
		exit "$status"
	} &
	servers=$!
	run packages "$packages" -p=2 "${race[@]}" "$@" || status=$?
	wait "$servers" || status=$?
fi
cat "$scratch"/*.json >"$scratch/json"
say "the slowest tests"
gotestsum tool slowest --num=10 --threshold=1s --jsonfile="$scratch/json"
late=$(grep -c 'SKIPPED: no time is left' "$scratch/json") || true
((late == 0)) || say "$late tests were skipped, as no time was left; make test-all runs them"
((status == 0)) || exit "$status"

if ((${#again[@]})); then
	packages=$(left_over "$scratch/json")
	[[ -z $packages ]] || die "failed as a whole: $packages"
	cat "$scratch"/*.again >"$scratch/again" 2>/dev/null || true
	[[ ! -s $scratch/again ]] || say "failed at first, passed alone, to be mended: $(cat "$scratch/again")"
fi

[[ -z ${PKG:-}${RUN:-} ]] || exit 0
# What is there only in the server that tests can kill.
CGO_ENABLED=1 go test -vet=off -race -tags failpoints ./internal/base/failpoint
