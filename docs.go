// Package barchan has the documents of this repository, for the site that the program serves. It is at the
// root, because they link to each other across directories and go:embed reaches no parent. It has no code.
package barchan

import "embed"

// Documents has the Markdown files and their pictures, by their paths in the repository.
//
//go:embed README.md ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs/*.md docs/adr/*.md docs/figures/*.svg
var Documents embed.FS
