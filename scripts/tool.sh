#!/usr/bin/env bash
# Builds the named programs from their Go modules into $BARCHAN_CACHE/bin. Each is
# built again only if its module's pins, the way it is built or Go changed.
#
#   scripts/tool.sh runsc containerd
source "$(dirname "$0")/lib.sh"

# recipe NAME sets how a program is built. Programs that are asked for their
# version are told it, as their own makefiles would do.
recipe() {
	tags='' version=''
	case $1 in
	runsc)
		module=runtimes/gvisor package=gvisor.dev/gvisor/runsc
		version=gvisor.dev/gvisor/runsc/version.version=$(pinned gvisor.dev/gvisor)
		;;
	containerd)
		module=runtimes/containerd package=github.com/containerd/containerd/v2/cmd/containerd
		version=github.com/containerd/containerd/v2/version.Version=$(pinned github.com/containerd/containerd/v2)
		# Snapshots are overlayfs's, and there is no kubelet to talk to.
		tags='no_btrfs no_zfs no_devmapper no_cri no_tracing'
		;;
	kube-apiserver)
		module=runtimes/kubernetes package=k8s.io/kubernetes/cmd/kube-apiserver
		local release minor
		release=$(pinned k8s.io/kubernetes)
		minor=${release#v1.}
		version=k8s.io/component-base/version.gitVersion=$release
		version+=" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=${minor%%.*}"
		;;
	kubectl)
		module=tools/kubectl package=.
		version=$(pinned k8s.io/kubectl)
		version=k8s.io/component-base/version.gitVersion=v1.${version#v0.}
		;;
	golangci-lint) module=tools package=github.com/golangci/golangci-lint/v2/cmd/golangci-lint ;;
	checklocks) module=tools package=gvisor.dev/gvisor/tools/checklocks/cmd/checklocks ;;
	gotestsum) module=tools package=gotest.tools/gotestsum ;;
	*) die "no recipe for the program $1" ;;
	esac
}

# pinned MODULE prints the version that the go.mod of the recipe asks for.
pinned() {
	awk -v m="$1" '$1 == m { print $2; exit } $1 == "require" && $2 == m { print $3; exit }' "$module/go.mod"
}

# stamp prints a hash of all that decides what is built.
stamp() {
	{
		cat "$module/go.mod" "$module/go.sum"
		[[ $package != . ]] || cat "$module"/*.go
		echo "$package $tags $version"
		go env GOVERSION GOARCH
	} | sha256sum | cut -d' ' -f1
}

build() {
	local name=$1
	scratch=$(mktemp -d "$BIN_DIR/.build.XXXXXX")
	(cd "$module" && CGO_ENABLED=0 GOFLAGS=-buildvcs=false \
		go build -trimpath -ldflags "-s -w ${version:+-X $version}" -tags "$tags" -o "$scratch/$name" "$package")
	mv -f "$scratch/$name" "$BIN_DIR/$name"
	rmdir "$scratch"
	scratch=''
}

only_one tools
for name in "$@"; do
	recipe "$name"
	want=$(stamp)
	if [[ -x $BIN_DIR/$name && $(cat "$BIN_DIR/.$name.stamp" 2>/dev/null) == "$want" ]]; then
		continue
	fi
	rm -f "$BIN_DIR/.$name.stamp"
	step "build $name" build "$name"
	echo "$want" >"$BIN_DIR/.$name.stamp"
done
