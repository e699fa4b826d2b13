# What all scripts share; to be sourced. It sets ROOT and BARCHAN_CACHE, finds a
# Go that is new enough, and goes to the root of the tree.
# shellcheck shell=bash
set -euo pipefail
shopt -s inherit_errexit

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

# Some runners set no HOME, which Go wants for its caches.
export HOME=${HOME:-/root}

# Node.js trusts the authorities that it was built with alone; a proxy's may be among the system's.
authorities=/etc/ssl/certs/ca-certificates.crt
[[ -n ${NODE_EXTRA_CA_CERTS:-} || ! -r $authorities ]] || export NODE_EXTRA_CA_CERTS=$authorities

# All programs are static. What compiles a package in the same way, for a program or for its tests, shares the
# result; only the race detector needs cgo.
export CGO_ENABLED=0

# The compiler collects garbage less often than by default, which takes a quarter less processor time.
# What is built or tested is not run so. All is compiled without the paths of this machine: what programs of
# several modules share, and tests, is compiled once. The modules name the same versions for that.
[[ ${GOFLAGS:-} == *-toolexec* ]] || export GOFLAGS="${GOFLAGS:-} -trimpath '-toolexec=env GOGC=800'"

# What can be made again is kept outside the tree, so that clones share it.
if [[ -z ${BARCHAN_CACHE:-} ]]; then
	if [[ $EUID -eq 0 || -w /var/cache/barchan ]]; then
		BARCHAN_CACHE=/var/cache/barchan
	else
		BARCHAN_CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/barchan
	fi
fi
export BARCHAN_CACHE
BIN_DIR=$BARCHAN_CACHE/bin
mkdir -p "$BIN_DIR"
export PATH="$BIN_DIR:$PATH"

# say prints a line about what goes on.
say() { printf '==> %s\n' "$*" >&2; }

# die prints why nothing more can be done, and ends.
die() {
	printf 'error: %s\n' "$*" >&2
	exit 1
}

# step WHAT COMMAND... runs the command and says how long it took. If it fails,
# the script ends: do not put it before || or into a condition.
step() {
	local began=$SECONDS
	doing=$1
	shift
	say "$doing"
	"$@"
	say "$doing: done in $((SECONDS - began)) s"
	doing=''
}

# go_build [-t] WHAT ARGUMENT... runs `go build`, or with -t `go test -c`, and prints every 15 s how many packages are done.
go_build() {
	local command=(go build) list=(go list -deps) what total
	if [[ $1 == -t ]]; then
		command=(go test -c) list+=(-test)
		shift
	fi
	what=$1
	shift
	total=$("${list[@]}" "${@: -1}" | wc -l)
	"${command[@]}" -v "$@" 2>&1 | build_progress "$what" "$total"
}

# build_progress WHAT TOTAL counts the packages that `go build -v` lists, and passes its errors on.
build_progress() {
	local line count=0 last=$SECONDS
	while IFS= read -r line; do
		if [[ ! $line =~ ^[A-Za-z0-9._~/-]+$ ]]; then
			printf '%s\n' "$line" >&2
			continue
		fi
		count=$((count + 1))
		if ((SECONDS - last >= 15)); then
			say "$1: $count packages compiled, at most $2"
			last=$SECONDS
		fi
	done
}

# on_exit says which step failed, and removes the directory named by scratch.
on_exit() {
	local status=$?
	if ((status)) && [[ -n ${doing:-} ]]; then
		printf 'error: %s: failed\n' "$doing" >&2
	fi
	if [[ -n ${scratch:-} ]]; then
		chmod -R u+w "$scratch" || true
		rm -rf "$scratch"
	fi
	exit "$status"
}
trap on_exit EXIT

# as_root COMMAND... runs the command as root.
as_root() {
	if [[ $EUID -eq 0 ]]; then
		"$@"
	else
		command -v sudo >/dev/null || die "this needs root: run it as root, or install sudo"
		sudo --preserve-env=BARCHAN_CACHE "$@"
	fi
}

# only_one takes a lock until the script ends, so that two runs do not do the
# same work at once.
only_one() {
	exec {lock_fd}>"$BARCHAN_CACHE/.$1.lock"
	flock "$lock_fd"
}

# go_wanted prints the newest Go version that one of our modules asks for.
go_wanted() {
	sed -n 's/^go \([0-9.]*\)$/\1/p' go.mod tools/go.mod tools/*/go.mod runtimes/*/go.mod |
		sort -V | tail -n 1
}

# go_is_enough says whether the program is a Go of at least the wanted version.
go_is_enough() {
	local have
	have=$(GOTOOLCHAIN=local "$1" env GOVERSION 2>/dev/null) || return 1
	have=${have#go}
	[[ $(printf '%s\n%s\n' "$(go_wanted)" "${have%% *}" | sort -V | head -n 1) == "$(go_wanted)" ]]
}

# A Go that deps.sh put into the cache steps in where the machine's is too old.
if ! go_is_enough go && go_is_enough "$BARCHAN_CACHE/go/bin/go"; then
	export PATH="$BARCHAN_CACHE/go/bin:$PATH"
	export GOTOOLCHAIN=local
fi
