#!/usr/bin/env bash
# Builds the named programs from their Go modules into $BARCHAN_CACHE/bin. Each is
# built again only if its module's pins, the way it is built or Go changed.
#
#   scripts/tool.sh runsc containerd
#   scripts/tool.sh kubernetes        # a control plane, a node and its DNS
source "$(dirname "$0")/lib.sh"

# recipe NAME sets how a program is built. Programs that print their version get it from the linker, as from their own makefiles. With
# tests, the program is that of the package's tests. What prepares is a program of our module that is
# run on a copy of the package's module, which is then built instead; our module's patches are applied to one too.
recipe() {
	tags='' version='' prepare='' tests=''
	case $1 in
	runsc)
		module=runtimes/gvisor package=gvisor.dev/gvisor/runsc
		# Seccomp filters, compiled now instead of at each start of a sandbox.
		prepare=./precompile
		version=gvisor.dev/gvisor/runsc/version.version=$(pinned gvisor.dev/gvisor)
		;;
	barchan-volumefs) module=runtimes/volumefs package=. ;; # serves volumes in buckets
	s3-server) module=tools/s3 package=. ;;                 # in tests
	nfs-server) module=tools/nfs package=. ;;               # in tests
	otelcol) module=tools/otelcol package=. ;;              # receives traces, in tests
	containerd)
		containerd_module cmd/containerd
		# Snapshots are overlayfs's, and there is no kubelet to talk to.
		tags='no_btrfs no_zfs no_devmapper no_cri no_tracing'
		;;
	containerd-cri) # the one that a kubelet talks to, in tests
		containerd_module cmd/containerd
		tags='no_btrfs no_zfs no_devmapper no_tracing'
		;;
	containerd-shim-runc-v2) containerd_module "cmd/$1" ;;
	containerd-shim-runsc-v1)
		module=tools/gvisor-shim package=gvisor.dev/gvisor/shim
		[[ $(pinned gvisor.dev/gvisor) == "$(module=runtimes/gvisor pinned gvisor.dev/gvisor)" ]] ||
			die "$module/go.mod pins another gVisor than runtimes/gvisor/go.mod; set the same version"
		;;
	cni-bridge) cni_module main/bridge ;;
	cni-host-local) cni_module ipam/host-local ;;
	cni-loopback) cni_module main/loopback ;;
	kube-apiserver | kube-controller-manager | kube-scheduler | kubelet) kubernetes_module runtimes/kubernetes "$1" ;;
	kube-apiserver-oldest) kubernetes_module runtimes/kubernetes-oldest kube-apiserver ;; # of the oldest release that we support
	kubectl)
		module=tools/kubectl package=.
		version=$(pinned k8s.io/kubectl)
		version=k8s.io/component-base/version.gitVersion=v1.${version#v0.}
		;;
	helm)
		module=tools/helm package=helm.sh/helm/v4/cmd/helm
		version=helm.sh/helm/v4/internal/version.version=$(pinned helm.sh/helm/v4)
		;;
	kwok) module=tools/kwok package=sigs.k8s.io/kwok/cmd/kwok ;; # plays kubelets
	# agent-sandbox's own, to test against and to measure beside.
	agent-sandbox-controller) agent_sandbox_module cmd/agent-sandbox-controller ;;
	agent-sandbox-router) agent_sandbox_module sandbox-router/cmd ;;
	agent-sandbox-e2e) agent_sandbox_module test/e2e test ;;
	agent-sandbox-e2e-extensions) agent_sandbox_module test/e2e/extensions test ;;
	agent-sandbox-client) agent_sandbox_module clients/go/sandbox test integration ;;
	coredns) module=tools/coredns package=. ;; # the DNS of a Kubernetes, in tests
	pebble) module=tools/pebble package=github.com/letsencrypt/pebble/v2/cmd/pebble ;;
	golangci-lint) module=tools package=github.com/golangci/golangci-lint/v2/cmd/golangci-lint ;;
	checklocks) module=tools package=gvisor.dev/gvisor/tools/checklocks/cmd/checklocks ;;
	gotestsum) module=tools package=gotest.tools/gotestsum ;;
	*) die "no recipe for the program $1" ;;
	esac
}

# containerd_module PACKAGE sets what the programs of containerd's module share.
containerd_module() {
	module=runtimes/containerd package=github.com/containerd/containerd/v2/$1
	version=github.com/containerd/containerd/v2/version.Version=$(pinned github.com/containerd/containerd/v2)
}

# agent_sandbox_module PACKAGE [test [TAG]] sets what the programs of agent-sandbox's module share. With test the program is
# that of the package's tests.
agent_sandbox_module() {
	module=tools/agent-sandbox package=sigs.k8s.io/agent-sandbox/$1 tests=${2:-} tags=${3:-}
}

# kubernetes_module MODULE COMMAND sets what the programs of Kubernetes share.
kubernetes_module() {
	module=$1 package=k8s.io/kubernetes/cmd/$2
	local release minor
	release=$(pinned k8s.io/kubernetes)
	minor=${release#v1.}
	version=k8s.io/component-base/version.gitVersion=$release
	version+=" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${minor%%.*}"
}

# cni_module PLUGIN sets what the CNI plugins share. In the cache their names begin with cni-,
# for other programs are called bridge and loopback too.
cni_module() {
	module=tools/cni package=github.com/containernetworking/plugins/plugins/$1
	version=github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion=$(pinned github.com/containernetworking/plugins)
}

# pinned MODULE prints the version that the go.mod of the recipe asks for.
pinned() {
	awk -v m="$1" '$1 == m { print $2; exit } $1 == "require" && $2 == m { print $3; exit }' "$module/go.mod"
}

# stamp prints a hash of all that decides what is built.
stamp() {
	{
		cat "$module/go.mod" "$module/go.sum"
		[[ $package != . ]] || find "$module" -name '*.go' -print0 | sort -z | xargs -0 cat
		[[ -z $prepare ]] || cat "$module/$prepare"/*.go
		[[ ! -d $module/patches ]] || cat "$module/patches"/*.patch
		echo "$package $tags $version${prepare:+ $prepare}${tests:+ tests}"
		go env GOVERSION GOARCH
	} | sha256sum | cut -d' ' -f1
}

build() {
	local name=$1
	scratch=$(mktemp -d "$BIN_DIR/.build.XXXXXX")
	(
		export GOFLAGS="$GOFLAGS -buildvcs=false"
		cd "$module"
		[[ -z $prepare && ! -d patches ]] || prepared
		go_build ${tests:+-t} "build $name" -ldflags "-s -w ${version:+-X $version}" -tags "$tags" -o "$scratch/$name" "$package"
	)
	mv -f "$scratch/$name" "$BIN_DIR/$name"
	rm -rf "$scratch"
	scratch=''
}

# prepared goes to a copy of our module that builds the package from a copy of the package's module, patched and
# prepared, by a program that is built from it too. Paths are relative, so that the program is the same wherever it is built.
prepared() {
	local source path
	read -r path source < <(go list -f '{{with .Module}}{{.Path}} {{.Dir}}{{end}}' "$package")
	cp -r go.mod go.sum ${prepare:+"$prepare"} "$scratch"
	cp -r --no-preserve=mode "$source" "$scratch/source"
	# The copy belongs to no repository, wherever it is.
	[[ ! -d patches ]] || GIT_CEILING_DIRECTORIES=$scratch git -C "$scratch/source" apply "$PWD"/patches/*.patch
	cd "$scratch"
	go mod edit -replace "$path=./source"
	[[ -z $prepare ]] || go run "$prepare" source
}

# fresh NAME says whether a program is in the cache with the wanted stamp.
fresh() {
	[[ -x $BIN_DIR/$1 && $(cat "$BIN_DIR/.$1.stamp" 2>/dev/null) == "$want" ]]
}

names=()
for name in "$@"; do
	case $name in
	kubernetes)
		names+=(kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl containerd-cri containerd-shim-runc-v2 runsc
			containerd-shim-runsc-v1 cni-bridge cni-host-local cni-loopback coredns)
		;;
	*) names+=("$name") ;;
	esac
done
missing=()
for name in "${names[@]}"; do
	recipe "$name"
	want=$(stamp)
	fresh "$name" || missing+=("$name")
done
((${#missing[@]})) || exit 0 # without waiting for those who build others

only_one tools
for name in "${missing[@]}"; do
	recipe "$name"
	want=$(stamp)
	! fresh "$name" || continue # built by another meanwhile
	rm -f "$BIN_DIR/.$name.stamp"
	step "build $name" build "$name"
	echo "$want" >"$BIN_DIR/.$name.stamp"
done
