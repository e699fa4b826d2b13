#!/usr/bin/env bash
# Measures pools and claims on a real kube-apiserver, whose kubelets are faked; see
# test/kube/bench. Arguments are those of that package, such as -rounds 3, -json,
# -peer DIR: another controller of the same kinds, which is measured in turns with ours,
# and -sandboxes 100,10000: ours beside so many running sandboxes, with -replicas 3.
# The report goes to stdout, all else to stderr.
source "$(dirname "$0")/lib.sh"

[[ $EUID -eq 0 ]] || die "a Kubernetes in namespaces of its own needs root: run it as root, or with sudo"
scripts/tool.sh kube-apiserver kube-controller-manager kube-scheduler kubectl kwok
scratch=$(mktemp -d)
step "measure" go test -count=1 -run '^$' -bench . -benchtime 1x -timeout 3h ./test/kube/bench -args -output "$scratch/report" "$@" >&2
cat "$scratch/report"
