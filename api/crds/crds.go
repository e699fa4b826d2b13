// Package crds has the definitions of our kinds for Kubernetes, one file for each. They are generated from the types.
package crds

import "embed"

// Files has the definitions as YAML.
//
//go:embed *.yaml
var Files embed.FS
