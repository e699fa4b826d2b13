#!/bin/sh
# Writes processpb and filesystempb from proto/. Needs protoc (Debian:
# protobuf-compiler); the Go plugins come from tools/go.mod.
set -eu
cd "$(dirname "$0")"
root=$(cd ../../.. && pwd)
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
for plugin in protoc-gen-go protoc-gen-connect-go; do
	# A script each, so that protoc can run what "go tool" runs.
	printf '#!/bin/sh\nexec go tool -C "%s" -modfile=tools/go.mod %s\n' "$root" "$plugin" >"$bin/$plugin"
	chmod +x "$bin/$plugin"
done
module=github.com/barchan-dev/barchan/internal/guest/envd
PATH="$bin:$PATH" protoc -I proto \
	--go_out=. --go_opt=module="$module" \
	--connect-go_out=. --connect-go_opt=module="$module",package_suffix= \
	process/process.proto filesystem/filesystem.proto
