#!/usr/bin/env bash
# Makes what users install without a compiler, below dist: a tar with install.sh, a Debian
# package, the Helm chart, and their SHA-256 sums. All programs in them are static. Two runs of one commit
# make the same files. Needs dpkg-deb; `make release` builds the programs first.
source "$(dirname "$0")/lib.sh"

arch=$(go env GOARCH)
tag=$(git describe --tags --match 'v[0-9]*' --always --dirty)
# A version starts with a digit, in Debian too; a commit without any tag comes before the first release.
version=${tag#v}
[[ $tag == v* ]] || version=0.0.0+$tag
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
name=barchan-$version-linux-$arch

scratch=$(mktemp -d)
tree=$scratch/$name

# stage makes the directory that the tar holds.
stage() {
	local lib=$tree/usr/lib/barchan share=$tree/usr/share file
	install -d "$lib" "$tree/usr/bin" "$share/doc/barchan" "$share/man/man1" \
		"$share/bash-completion/completions" "$share/zsh/vendor-completions" "$share/fish/vendor_completions.d"
	for file in bin/barchan bin/barchan-agent bin/barchan-bench "$BIN_DIR/runsc" "$BIN_DIR/containerd" "$BIN_DIR/barchan-volumefs"; do
		is_static "$file" || die "$file is not a static program"
		install -m 0755 "$file" "$lib/"
	done
	ln -s ../lib/barchan/barchan "$tree/usr/bin/barchan"
	bin/barchan completion bash >"$share/bash-completion/completions/barchan"
	bin/barchan completion zsh >"$share/zsh/vendor-completions/_barchan"
	bin/barchan completion fish >"$share/fish/vendor_completions.d/barchan.fish"
	go run ./internal/client/cli/manpages "$share/man/man1" "$version"
	gzip -9n "$share/man/man1"/*.1
	install -m 0644 LICENSE README.md CHANGELOG.md "$share/doc/barchan/"
	install -m 0644 packaging/chart/barchan/files/* "$share/doc/barchan/"
	install -m 0644 packaging/barchan.service packaging/config.yaml "$tree/"
	install -m 0755 packaging/install.sh "$tree/"
	echo "$version" >"$tree/VERSION"
	echo "$arch" >"$tree/ARCH"
}

# is_static says whether a program needs no dynamic loader.
is_static() { ! LC_ALL=C readelf --program-headers "$1" | grep -q INTERP; }

make_tar() {
	tar -C "$scratch" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
		-cf - "$name" | gzip -9n >"dist/$name.tar.gz"
}

make_deb() {
	local root=$scratch/deb script
	install -d "$root/DEBIAN" "$root/etc/barchan" "$root/usr/lib/systemd/system"
	cp -a "$tree/usr" "$root/"
	install -m 0644 packaging/barchan.service "$root/usr/lib/systemd/system/"
	install -m 0644 packaging/config.yaml "$root/etc/barchan/"
	echo /etc/barchan/config.yaml >"$root/DEBIAN/conffiles"
	for script in postinst prerm postrm; do
		install -m 0755 "packaging/$script" "$root/DEBIAN/"
	done
	cat >"$root/DEBIAN/control" <<-END
		Package: barchan
		Version: $version
		Architecture: $arch
		Maintainer: Barchan authors <maintainers@barchan.invalid>
		Installed-Size: $(du -sk "$root/usr" | cut -f1)
		Depends: mmdebstrap, passwd, ca-certificates, debian-archive-keyring
		Recommends: runc (>= 1.1), npm
		Section: admin
		Priority: optional
		Description: sandboxes for AI agents on your own machine
		 Barchan runs untrusted code in isolated sandboxes. One server has the E2B API,
		 a Kubernetes API and the gateway to the sandboxes. gVisor and containerd are included.
	END
	find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
	dpkg-deb --root-owner-group --build "$root" "dist/barchan_${version}_$arch.deb" >/dev/null
}

command -v dpkg-deb >/dev/null || die "dpkg-deb is missing: install the package dpkg"
command -v readelf >/dev/null || die "readelf is missing: install the package binutils"
rm -rf dist
mkdir dist
umask 022
step "collect files of $version" stage
step "make dist/$name.tar.gz" make_tar
step "make dist/barchan_${version}_$arch.deb" make_deb
step "make the Helm chart" bin/barchan cluster chart dist
(cd dist && sha256sum -- * >SHA256SUMS)
ls -l dist >&2
