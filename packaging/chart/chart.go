// Package chart has the Helm chart of a cluster's roles. The definitions of our kinds, which the chart installs too, are in package crds.
package chart

import "embed"

// Files has the chart in the directory barchan.
//
//go:embed all:barchan
var Files embed.FS
