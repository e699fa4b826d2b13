package docsite

import (
	"path"
	"strings"
)

// entry is a link of the navigation: a document, and a short name for it.
type entry struct{ document, label string }

// group is a part of the navigation.
type group struct {
	title   string
	entries []entry
}

// decisions is the directory of the documents that are listed on a page of their own.
const decisions = "docs/adr"

// groups is the navigation. A test requires every document in it, but those of decisions.
var groups = []group{
	{"Start", []entry{
		{"README.md", "Install and first result"},
		{"docs/concepts.md", "Concepts"},
		{"docs/comparison.md", "Comparison and limits"},
		{"docs/figures.md", "Figures"},
		{"docs/growth.md", "Growth"},
	}},
	{"Tutorials", []entry{
		{"docs/tutorial-program.md", "An E2B program"},
		{"docs/tutorial-evaluation.md", "An evaluation"},
		{"docs/tutorial-forks.md", "A tree of forks"},
		{"docs/tutorial-interpreter.md", "The code interpreter"},
		{"docs/tutorial-browser.md", "A browser agent"},
		{"docs/tutorial-cluster.md", "A cluster"},
		{"docs/recipes.md", "Recipes"},
	}},
	{"Use", []entry{
		{"docs/sandboxes.md", "Sandboxes"},
		{"docs/templates.md", "Templates"},
		{"docs/images.md", "Images"},
		{"docs/pools.md", "Warm pools and claims"},
		{"docs/memory.md", "Pause, snapshot, fork"},
		{"docs/volumes.md", "Volumes"},
		{"docs/gateway.md", "Gateway"},
		{"docs/egress.md", "Egress"},
		{"docs/ssh.md", "SSH"},
		{"docs/events.md", "Events and webhooks"},
		{"docs/interpreter.md", "Code interpreter"},
		{"docs/go-client.md", "Go client"},
		{"docs/mcp.md", "Model Context Protocol"},
		{"docs/dashboard.md", "Dashboard"},
	}},
	{"Operate", []entry{
		{"docs/operations.md", "Operations"},
		{"docs/upgrade.md", "Upgrade"},
		{"docs/observability.md", "Metrics, alerts, traces"},
		{"docs/tenancy.md", "Tenants, keys, quotas"},
		{"docs/security.md", "Security in operation"},
		{"SECURITY.md", "Threat model"},
		{"docs/replicas.md", "Replicas"},
		{"docs/kubernetes.md", "Kubernetes"},
		{"docs/benchmarks.md", "Benchmarks"},
	}},
	{"Reference", []entry{
		{"docs/cli.md", "Commands"},
		{"docs/cli.md#settings", "Settings"},
		{"docs/kinds.md", "Kinds"},
		{"docs/rest.md", "REST API"},
		{"docs/metrics.md", "Metrics"},
		{"ARCHITECTURE.md", "Architecture"},
		{"CONTRIBUTING.md", "Contributing"},
		{"CHANGELOG.md", "Changelog"},
	}},
	{"Decisions", []entry{{decisions, "All decisions"}}},
}

// FirstPage is the file of the site to begin with.
const FirstPage = "index.html"

// names has the files of documents that are not named after them.
var names = map[string]string{
	"README.md": FirstPage, "SECURITY.md": "threat-model.html", decisions: "adr/index.html",
}

// picture is the extension of the pictures that documents show.
const picture = ".svg"

// fileOf is the name in the site of a picture, or of a document, which may have a fragment.
func fileOf(document string) string {
	if path.Ext(document) == picture {
		return strings.TrimPrefix(document, "docs/")
	}
	document, fragment, found := strings.Cut(document, "#")
	name := names[document]
	if name == "" {
		name = strings.TrimSuffix(strings.TrimPrefix(document, "docs/"), ".md") + ".html"
	}
	if !strings.Contains(document, "/") {
		name = strings.ToLower(name)
	}
	if found {
		name += "#" + fragment
	}
	return name
}
