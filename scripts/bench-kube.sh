#!/usr/bin/env bash
# Measures pools and claims on a real kube-apiserver, whose kubelets are faked; see
# test/kube/bench. Arguments are those of that package, such as -rounds 3, -json,
# -peer agent-sandbox: its controllers are measured in turns with ours; -peer DIR: those of DIR are,
# and -sandboxes 100,10000: ours beside so many running sandboxes, with -replicas 3.
# The report goes to stdout, all else to stderr.
source "$(dirname "$0")/lib.sh"

[[ $EUID -eq 0 ]] || die "a Kubernetes in namespaces of its own needs root: run it as root, or with sudo"
scripts/tool.sh kube-apiserver kube-controller-manager kube-scheduler kubectl kwok
scratch=$(mktemp -d)
arguments=()
while (($#)); do
	arguments+=("$1")
	if [[ $1 =~ ^--?peer$ && ${2:-} == agent-sandbox ]]; then
		scripts/tool.sh agent-sandbox-controller
		mkdir "$scratch/agent-sandbox"
		ln -s "$BIN_DIR/agent-sandbox-controller" "$scratch/agent-sandbox/controller"
		ln -s "$(cd tools/agent-sandbox && go list -m -f '{{.Dir}}' sigs.k8s.io/agent-sandbox)/k8s/crds" "$scratch/agent-sandbox/crds"
		arguments+=("$scratch/agent-sandbox" -peer-args '-leader-elect=false -extensions -enable-webhook=false')
		shift
	fi
	shift
done
step "measure" go test -count=1 -run '^$' -bench . -benchtime 1x -timeout 3h ./test/kube/bench -args -output "$scratch/report" "${arguments[@]}" >&2
cat "$scratch/report"
