#!/usr/bin/env bash
# Regenerates what is derived from the types under api/: deep copies, model names, OpenAPI
# definitions and CRDs. Harmless to repeat; `git diff --exit-code` afterwards tells whether
# anything was stale.
#
# The types of Kubernetes carry no markers of ours: tighten.go adds what our rules ask of them, and removes their descriptions.
#
# openapi-gen writes its model-name file into every input package that it may, the module
# cache included; so model names are made for our packages alone, in a run of their own.
set -euo pipefail
cd "$(dirname "$0")/.."

tool() { go tool -modfile=tools/go.mod "$@"; }

own=(./api/agents/v1beta1 ./api/extensions/v1beta1 ./api/barchan/v1alpha1)
kube=(k8s.io/api/{core,coordination,events,networking,autoscaling}/v1
  k8s.io/apimachinery/pkg/{apis/meta/v1,runtime,version,api/resource,util/intstr})
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
: >"$scratch/header.txt"

tool controller-gen object:headerFile=/dev/null paths=./api/...
tool openapi-gen --go-header-file "$scratch/header.txt" --report-filename /dev/null \
  --output-dir "$scratch" --output-pkg scratch --output-file unused.go \
  --output-model-name-file zz_generated.model_name.go "${own[@]}"
tool openapi-gen --go-header-file "$scratch/header.txt" --report-filename /dev/null \
  --output-dir api/openapi --output-pkg github.com/barchan-dev/barchan/api/openapi \
  --output-file zz_generated.openapi.go "${own[@]}" "${kube[@]}"
tool controller-gen crd paths=./api/... output:crd:dir=api/crds
go run api/tighten.go api/crds/*.yaml
