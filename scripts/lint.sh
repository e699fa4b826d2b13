#!/usr/bin/env bash
# Looks for what should not be in the code: linters, the lock checker, and a
# checker of shell scripts.
source "$(dirname "$0")/lib.sh"
scripts/tool.sh golangci-lint checklocks

lint_scripts() {
	git ls-files -z --cached --others --exclude-standard -- '*.sh' .ci/run packaging/postinst packaging/prerm packaging/postrm |
		xargs -0 shellcheck --external-sources --source-path=SCRIPTDIR --severity=warning
}

step "golangci-lint" golangci-lint run --allow-parallel-runners ./...
step "checklocks" go vet -vettool="$BIN_DIR/checklocks" -inferred=false -wrappers=false ./...
step "shellcheck" lint_scripts
for tests in alerts figures; do
	step "$tests" go -C "tools/$tests" test -vet=off -count=1 ./...
done
