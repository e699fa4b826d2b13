#!/usr/bin/env bash
# Measures a whole server of its own. Each figure stands beside the floor measured
# in the same run, since a number alone tells more of the machine than of us.
# All of it takes ten to fifteen minutes on two cores; each chapter is printed as it
# ends, and Ctrl-C leaves a table of what is done.
# Arguments are those of test/bench, such as --json, --quick and --only exec,api.
source "$(dirname "$0")/lib.sh"

[[ $EUID -eq 0 ]] || die "a whole server needs root: run it as root, or with sudo"
[[ -x bin/barchan && -x bin/barchan-agent ]] || die "bin/barchan is missing: run \`make build\`"
step "build the bench" scripts/build.sh bench
bin/barchan-bench --all "$@"
