#!/bin/sh
# Writes zz_generated_api.go from openapi.yaml.
set -eu
cd "$(dirname "$0")"
go tool -modfile=../../../../tools/go.mod oapi-codegen -config oapi-codegen.yaml openapi.yaml
# The package comment stands in doc.go.
sed -i -e '/^\/\/ Package api provides/,+1d' -e 's/^package api$/\n&/' zz_generated_api.go
