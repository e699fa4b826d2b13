#!/usr/bin/env bash
# Starts the server, makes the base image unless there is one, and runs a first
# program in a sandbox. Harmless to repeat.
source "$(dirname "$0")/lib.sh"

as_root bin/barchan up --detach
as_root bin/barchan image build base
# shellcheck disable=SC2016 # the sandbox's shell expands it
step "run a first program in a sandbox" as_root bin/barchan run -- \
	sh -c 'echo "hello from $(uname -s) $(uname -r), as $(id -un), with $(python3 --version)"'
