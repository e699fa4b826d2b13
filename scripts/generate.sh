#!/usr/bin/env bash
# Makes generated code anew. With --check it fails if that changed anything: then
# what was committed was stale, and the tree now has what is right.
source "$(dirname "$0")/lib.sh"

# fingerprint prints a hash and the name of each file that git knows or would add.
fingerprint() {
	git ls-files -z --cached --others --exclude-standard |
		while IFS= read -r -d '' file; do
			[[ ! -f $file ]] || printf '%s\0' "$file"
		done | xargs -0 sha256sum | sort -k 2
}

generate() {
	local script scripts
	mapfile -t scripts < <(git ls-files --cached --others --exclude-standard -- '*/generate.sh' ':!scripts' | sort -u)
	for script in "${scripts[@]}"; do
		step "run $script" "./$script"
	done
	# The other directives; those that name a script above would run it twice.
	go generate -skip 'generate\.sh' ./...
}

case ${1:-} in
--check)
	before=$(fingerprint)
	generate
	after=$(fingerprint)
	if [[ $before != "$after" ]]; then
		say "generated files were stale; commit these:"
		diff <(echo "$before") <(echo "$after") | sed -n 's/^[<>] [0-9a-f]*  /  /p' | sort -u >&2
		exit 1
	fi
	;;
'') generate ;;
*) die "usage: scripts/generate.sh [--check]" ;;
esac
