#!/bin/sh
# Installs Barchan from the directory of this script, which the release's tar unpacks to.
#
#   ./install.sh               install below /usr, with a systemd service if systemd runs
#   ./install.sh --prefix DIR  install below DIR instead
#   ./install.sh --uninstall   remove what was installed; data and sandboxes stay
#
# It needs root, and no compiler. A second run upgrades.
set -eu

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0"; }
die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

prefix=/usr
uninstall=
while [ $# -gt 0 ]; do
	case $1 in
	--prefix)
		[ $# -ge 2 ] || die "--prefix needs a directory"
		prefix=${2%/}
		shift
		;;
	--uninstall) uninstall=yes ;;
	-h | --help)
		usage
		exit 0
		;;
	*) die "unknown argument $1; see ./install.sh --help" ;;
	esac
	shift
done
case $prefix in
/*) ;;
*) die "--prefix must be an absolute path, not $prefix" ;;
esac
[ "$(id -u)" -eq 0 ] || die "this needs root: run it with sudo"

here=$(cd "$(dirname "$0")" && pwd)
[ "$(uname -s)" = Linux ] || die "Barchan runs on Linux, this is $(uname -s)"
want=$(cat "$here/ARCH")
case $(uname -m) in
x86_64) have=amd64 ;;
aarch64) have=arm64 ;;
*) have=$(uname -m) ;;
esac
[ "$have" = "$want" ] || die "this release is for $want, the machine is $have"

unit=/etc/systemd/system/barchan.service
has_systemd() { [ -d /run/systemd/system ]; }

if [ "$uninstall" ]; then
	if has_systemd && [ -e "$unit" ]; then
		systemctl disable --now barchan
		rm -f "$unit"
		systemctl daemon-reload
	fi
	# Only files that this release has are removed.
	(cd "$here/usr" && find . ! -type d) | while read -r file; do
		rm -f "$prefix/$file"
	done
	rmdir "$prefix/lib/barchan" 2>/dev/null || true
	echo "Removed Barchan from $prefix. /etc/barchan and /var/lib/barchan were kept."
	exit 0
fi

# Files are replaced by renaming: the old programs may be running.
(cd "$here/usr" && find . -type d) | while read -r dir; do
	mkdir -p "$prefix/$dir"
done
(cd "$here/usr" && find . ! -type d) | while read -r file; do
	cp -P "$here/usr/$file" "$prefix/$file.new"
	mv -f "$prefix/$file.new" "$prefix/$file"
done
# The user of the server's process with `privileges: apart`; without it an ID is used.
if command -v useradd >/dev/null && ! getent passwd barchan >/dev/null; then
	useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin barchan
fi
mkdir -p /etc/barchan
[ -e /etc/barchan/config.yaml ] || cp "$here/config.yaml" /etc/barchan/config.yaml
if has_systemd; then
	sed "s#/usr/bin/barchan#$prefix/bin/barchan#" "$here/barchan.service" >"$unit"
	systemctl daemon-reload
fi

missing=
for program in mmdebstrap runc; do
	command -v "$program" >/dev/null || missing="$missing $program"
done
echo "Installed Barchan $(cat "$here/VERSION") in $prefix."
if [ "$missing" ]; then
	echo "Missing programs:$missing. On Debian: apt-get install$missing"
	echo "(mmdebstrap builds the base image; runc runs sandboxes without gVisor.)"
fi
echo
echo "Next:"
if has_systemd; then
	echo "  systemctl enable --now barchan      # start the server, now and at boot"
else
	echo "  $prefix/bin/barchan up --detach           # start the server"
fi
echo "  $prefix/bin/barchan image build base      # build the base image, once"
echo "  $prefix/bin/barchan run -- uname -a       # run a first command in a sandbox"
