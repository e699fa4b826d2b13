#!/usr/bin/env bash
# Checks the layers and the owners of dependencies.
source "$(dirname "$0")/lib.sh"

step "architecture" go test -vet=off -count=1 .
