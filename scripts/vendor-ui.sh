#!/usr/bin/env bash
# Takes the dashboard's libraries from the npm registry, at the versions below, into
# internal/edge/dashboard/web/vendor, with their licences and a list of versions and hashes.
# Users and builds need none of this: the files are in the repository.
source "$(dirname "$0")/lib.sh"

packages=(htm@3.1.1 preact@10.29.8 uplot@1.6.32 @xterm/xterm@6.0.0 @xterm/addon-fit@0.11.0)
tools=(esbuild@0.25.12 axe-core@4.11.0) # to join Preact's modules; for the test of accessibility alone
out=internal/edge/dashboard/web/vendor

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm install --silent --no-audit --no-fund "${packages[@]}" "${tools[@]}")
from=$work/node_modules
rm -rf "$out"
mkdir -p "$out"
cat >"$work/preact.js" <<'EOF'
import { h } from 'preact';
import htm from 'htm';
export { h, render, Fragment } from 'preact';
export * from 'preact/hooks';
export const html = htm.bind(h);
EOF
"$from/.bin/esbuild" "$work/preact.js" --bundle --minify --format=esm --log-level=warning >"$out/preact.js"
{ cat "$from/uplot/dist/uPlot.iife.min.js" && echo 'export default uPlot;'; } >"$out/uplot.js"
cp "$from/uplot/dist/uPlot.min.css" "$out/uplot.css"
sed '/^\/\/# sourceMappingURL/d' "$from/@xterm/xterm/lib/xterm.mjs" >"$out/xterm.js"
sed '/^\/\/# sourceMappingURL/d' "$from/@xterm/addon-fit/lib/addon-fit.mjs" >"$out/xterm-fit.js"
cp "$from/@xterm/xterm/css/xterm.css" "$out/xterm.css"
cp "$from/axe-core/axe.min.js" internal/testkit/browser/axe.min.js
for package in htm preact uplot @xterm/xterm axe-core; do
	echo "=== $package"
	cat "$from/$package/LICENSE"
done >"$out/LICENSES.txt"
{
	printf '%s\n' "${packages[@]}" "${tools[@]}"
	(cd "$out" && sha256sum -- *.js *.css)
} >"$out/VERSIONS.txt"
cat "$out/VERSIONS.txt"
