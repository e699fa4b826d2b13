#!/usr/bin/env bash
# Stops the server; sandboxes run on, and the next server adopts them. With --all
# it removes the sandboxes, their data and all that the server put on the machine;
# the cache of what was built stays.
source "$(dirname "$0")/lib.sh"

[[ -x bin/barchan ]] || die "bin/barchan is missing: run \`make build\`"
as_root bin/barchan down "$@" ${1:+--yes}
