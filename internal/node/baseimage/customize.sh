#!/bin/sh
# Turns a fresh root file system into what a sandbox expects to find.
# mmdebstrap calls it on the host with the root's path, once packages are in.
set -eu
root=$1

chroot "$root" groupadd --gid 1000 user
chroot "$root" useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash --comment "" user
chroot "$root" usermod --append --groups sudo user
# "*" is no password at all, where "!" would also lock out su and ssh keys.
chroot "$root" usermod --password '*' user

cat >"$root/etc/sudoers.d/user" <<'SUDO'
Defaults:user !requiretty, !lecture
user ALL=(ALL:ALL) NOPASSWD: ALL
SUDO
chmod 0440 "$root/etc/sudoers.d/user"
chroot "$root" visudo --check --quiet

# Each command of E2B's SDKs is a login shell, which starts id(1), and root's mesg(1). In a sandbox a process takes longer than the
# rest of the shell's start. bash knows its user, and without a terminal there is nothing for mesg to do.
sed -i 's/\$(id -u)/${EUID:-$(id -u)}/g' "$root/etc/profile"
sed -i 's/^mesg n/[ ! -t 0 ] || mesg n/' "$root/root/.profile"

# With LANG, which the image sets, a program opens each of a locale's twelve files, under two names. In an archive they are one file.
chroot "$root" localedef --add-to-archive /usr/lib/locale/C.utf8 >/dev/null

ln -sf python3 "$root/usr/bin/python"

# E2B's SDKs run this program for the option mcp. The agent, which each sandbox has there, is it by that name.
ln -s /.barchan/agent "$root/usr/local/bin/mcp-gateway"

# The runtime binds its own files over these three; they must exist for that.
printf '127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"
: >"$root/etc/resolv.conf"
printf 'sandbox\n' >"$root/etc/hostname"

# Under SOURCE_DATE_EPOCH Python was compiled so that each import hashes the
# source again. Modules checked by their time cost a sandbox less.
chroot "$root" env -u SOURCE_DATE_EPOCH python3 -m compileall -q -f -j 0 \
	--invalidation-mode timestamp /usr/lib/python3*

# Settings for the build alone, and what differs from one build to the next.
rm -f "$root/etc/apt/apt.conf.d/99mmdebstrap"
rm -rf "$root"/var/cache/apt/*.bin "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old \
	"$root"/etc/passwd- "$root"/etc/group- "$root"/etc/shadow- "$root"/etc/gshadow- \
	"$root"/etc/subuid- "$root"/etc/subgid- "$root"/var/log/bootstrap.log
# The day of the last password change would be the day of the build.
sed -i -E 's/^(([^:]*:){2})[0-9]+:/\1:/' "$root/etc/shadow"
