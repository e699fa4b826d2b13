#!/usr/bin/env bash
# Installs what is missing to build, test and run: packages of the distribution,
# and a Go toolchain if the machine's is too old. With the argument `up`, only what
# `make up` needs. A second run only looks.
source "$(dirname "$0")/lib.sh"

# wanted prints the packages whose programs or files are missing.
wanted() {
	local pair programs=(git:git make:make tar:tar unshare:util-linux mmdebstrap:mmdebstrap runc:runc node:nodejs npm:npm mkfs.ext4:e2fsprogs)
	if [[ $purpose != up ]]; then
		programs+=(curl:curl ssh:openssh-client gcc:gcc ip:iproute2 nft:nftables busybox:busybox-static pgrep:procps
			protoc:protobuf-compiler shellcheck:shellcheck chromium-headless-shell:chromium-headless-shell) # 62 MiB: for the dashboard
		[[ -e /usr/include/stdlib.h ]] || echo libc6-dev # the race detector links C
		[[ -e /usr/include/google/protobuf/timestamp.proto ]] || echo libprotobuf-dev
	fi
	for pair in "${programs[@]}"; do
		command -v "${pair%%:*}" >/dev/null || echo "${pair#*:}"
	done
	[[ -e /etc/ssl/certs/ca-certificates.crt ]] || echo ca-certificates
	[[ -e /usr/share/keyrings/debian-archive-keyring.gpg ]] || echo debian-archive-keyring
	# Any Go can fetch the one that we want.
	if ! command -v go >/dev/null && [[ ! -x $BARCHAN_CACHE/go/bin/go ]]; then
		echo golang-go
	fi
}

apt_install() {
	local quiet=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
	if ! as_root "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null 2>&1; then
		# The package lists are missing or old.
		as_root "${quiet[@]}" update
		as_root "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null
	fi
}

# fetch_go takes the wanted Go from the module proxy, checked against the sum
# database as any module is.
fetch_go() {
	local version arch module dir
	version=$(go_wanted)
	arch=$(go env GOARCH)
	scratch=$(mktemp -d "$BARCHAN_CACHE/.go.XXXXXX")
	module=golang.org/toolchain@v0.0.1-go$version.linux-$arch
	(cd "$scratch" && GOTOOLCHAIN=local GOFLAGS=-modcacherw GOPATH="$scratch" go mod download "$module")
	dir=$scratch/pkg/mod/$module
	# A module's files are not executable.
	chmod -R u+w "$dir"
	find "$dir/bin" "$dir/pkg/tool" -type f -exec chmod 0755 {} +
	rm -rf "$BARCHAN_CACHE/go"
	mv "$dir" "$BARCHAN_CACHE/go"
	go_is_enough "$BARCHAN_CACHE/go/bin/go" || die "the Go from the module proxy does not run"
}

case ${1:-} in
'' | up) purpose=${1:-} ;;
*) die "usage: scripts/deps.sh [up]" ;;
esac
only_one deps
mapfile -t missing < <(wanted)
if ((${#missing[@]})); then
	command -v apt-get >/dev/null ||
		die "install these, and run this again: ${missing[*]}"
	step "install ${missing[*]}" apt_install "${missing[@]}"
fi
if ! go_is_enough go && ! go_is_enough "$BARCHAN_CACHE/go/bin/go"; then
	step "fetch Go $(go_wanted)" fetch_go
fi
