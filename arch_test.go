// Package barchan_test checks the rules that hold for the whole module: who may
// import whom, and that every package says what it is for.
package barchan_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"
)

const module = "github.com/barchan-dev/barchan"

// planes lists the parts of the system that could be processes of their own, each a
// directory of internal, with the planes and the packages beside them that its packages
// may import. What wires the planes (config, adminapi, daemon, cmd) may import all of
// them; no plane imports what wires it, but for what is listed here. Tests are exempt:
// they may put a package beside the real part of another plane.
var planes = map[string][]string{
	"base":    {},
	"guest":   {"base"},
	"node":    {"base", "guest"},
	"control": {"base", "guest"},
	"edge":    {"base", "guest", "control"},
	"client":  {"base", "guest", "config"},
}

// layers lists the packages, lowest layer first. A package may import packages of
// lower layers, and of its own family: the packages below its own listed one. So
// parts of one layer never know each other. A package below a listed one, such
// as internal/guest/envd/processpb, is in the layer of its nearest listed parent. A
// plane's own package, such as internal/node, has no family: each package below it is listed.
var layers = [][]string{
	0: {
		"api/agents/v1beta1", "internal/base/errs", "internal/base/lifecycle", "internal/base/telemetry", "internal/base/failpoint",
		"internal/base/signedurl", "internal/base/podsource", "internal/base/webfile", "api/crds", "packaging/chart", "internal/testkit/eventually", "internal/testkit/fuzztar", "internal/testkit/browser", "internal/testkit/tmpfs", "internal/testkit/fakeapi", "internal/base", "internal/control", "internal/edge", "internal/guest", "internal/client",
	},
	1: {"api/extensions/v1beta1", "api/barchan/v1alpha1", "internal/base/sandbox", "internal/base/durable", "internal/base/volumetree", "internal/base/health", "internal/base/inflight", "internal/base/keyedlock", "internal/base/auditlog", "internal/base/docsite", "internal/node/projection", "internal/testkit/ownnet", "internal/testkit/program"},
	2: {
		"api/openapi", "internal/testkit/nfs", "internal/testkit/s3", "internal/base/keyfile", "internal/base/migrate", "internal/base/localca", "internal/base/pool", "internal/base/portable", "internal/guest/interpreter", "internal/guest/mcpgateway",
		"internal/node/disk", "internal/node/ipam", "internal/node/egress", "internal/edge/route",
		"internal/control/apiserver/gc", "internal/control/apiserver/kinds", "internal/control/apiserver/liblog", // without storage; the rest is apiserver's family
	},
	3: {
		"internal/control/apiserver", "internal/control/cache", "internal/control/apistatus", "internal/control/assumecache", "internal/control/builds", "internal/control/events", "internal/control/picker", "internal/control/quota",
		"internal/node/ctrd", "internal/node/oci", "internal/node/netdev", "internal/node/volumes", "internal/node/baseimage", "internal/node/toolchain", "internal/node/resolver",
		"internal/edge/peers", "internal/edge/acme", "internal/guest/envd",
		"internal/client/adminclient", "internal/client/kubeobjects", "internal/testkit",
	},
	4: {
		"internal/testkit/embedded", "internal/control/claiming", "internal/control/agentclient", "internal/control/kubeauth", "internal/control/webhooks", "internal/control/paging", "internal/edge/gateway", "internal/guest/agent", "internal/testkit/claimsuite", "internal/testkit/kubecluster",
		"internal/node/agentconn", "internal/node/images", "internal/node/oom", "internal/node/plan", "internal/node/probe", "internal/node/programs", "internal/node/memstore", "internal/client/cluster", "client",
	},
	5:  {"internal/control/controllers", "internal/control/manager", "internal/control/podlogs", "internal/edge/sshd", "internal/adminapi", "internal/config", "internal/node/journal", "internal/node/references", "internal/client/dockerfile", "internal/testkit/kubeinstall"},
	6:  {"internal/client/bundle", "internal/edge/e2b", "internal/node/registry", "internal/testkit/kubefakes"},
	7:  {"internal/node/checkpoint", "internal/node/cpushare", "internal/edge/dashboard"},
	8:  {"internal/node/transfer", "internal/node/operation", "internal/client/cli/terminal"},
	9:  {"internal/node/inventory", "internal/node/capture", "internal/node/suspend", "internal/node/supervise", "internal/client/cli/app"},
	10: {"internal/node/recovery"},
	11: {"internal/node"},
	12: {
		"internal/daemon", "internal/client/cli/admin", "internal/client/cli/artifact", "internal/client/cli/build", "internal/client/cli/cluster", "internal/client/cli/events", "internal/client/cli/files", "internal/client/cli/mcp", "internal/client/cli/ports",
		"internal/client/cli/resources", "internal/client/cli/sandboxes", "internal/client/cli/ssh",
	},
	13: {"internal/client/cli"},
	14: {"cmd/barchan", "cmd/barchan-agent"},
	15: {"test/bench/report", "test/bench/proc"},
	16: {"test/bench/harness"},
	17: {"test/bench/gobench"},
	18: {"test/bench/create", "test/bench/files", "test/bench/gateway", "test/bench/images", "test/bench/neighbors", "test/bench/scale", "test/bench/sleep"},
	19: {"test/bench"},
}

// owners names, for a dependency that is heavy or dangerous, the packages that
// may import it. Prefixes of import paths; the longest that fits decides.
var owners = map[string][]string{
	"k8s.io/apiserver":                 {"internal/control/apiserver"},
	"k8s.io/apiextensions-apiserver":   {"internal/control/apiserver"},
	"k8s.io/cri-streaming":             {"internal/control/apiserver"},
	"k8s.io/streaming":                 {"internal/control/apiserver"},
	"go.etcd.io/etcd":                  {"internal/control/apiserver", "internal/testkit/kubecluster"},
	"go.etcd.io/bbolt":                 {"test/bench/scale", "internal/control/events", "internal/node/ipam", "internal/node/journal", "internal/node/checkpoint", "internal/node"},
	"github.com/containerd/containerd": {"internal/node/ctrd"},
	"github.com/containerd/errdefs":    {"internal/node/ctrd"},
	"github.com/containerd/platforms":  {"internal/node/ctrd"},
	"github.com/containerd/typeurl":    {"internal/node/ctrd"},
	"github.com/containerd/go-runc":    {"internal/node/oci"},
	"gvisor.dev/gvisor":                {}, // a program to us, never a library
	"github.com/vishvananda/netlink":   {"internal/node/netdev"},
	"github.com/vishvananda/netns":     {"internal/node/netdev"},
	"github.com/google/nftables":       {"internal/node/netdev"},
	"github.com/mdlayher/netlink":      {"internal/node/netdev"},
	module + "/internal/guest/agent":   {"cmd/barchan-agent"},
	module + "/internal/testkit":       {}, // tests alone
	"github.com/hashicorp/memberlist":  {"internal/edge/peers"},
	"github.com/miekg/dns":             {"internal/node/resolver", "internal/edge/acme"},
	"golang.org/x/crypto/acme":         {"internal/edge/acme"},
	"golang.org/x/crypto/ssh":          {"internal/edge/sshd"},
	"github.com/pkg/sftp":              {"internal/guest/agent"},
	"github.com/spf13/cobra": {
		"internal/client/cli", "internal/client/cli/app", "internal/client/cli/admin", "internal/client/cli/artifact", "internal/client/cli/build", "internal/client/cli/cluster", "internal/client/cli/events", "internal/client/cli/files",
		"internal/client/cli/mcp", "internal/client/cli/ports", "internal/client/cli/resources", "internal/client/cli/sandboxes", "internal/client/cli/ssh",
	},
	"github.com/google/go-containerregistry": {"internal/node/baseimage", "internal/node/ctrd", "internal/node/images", "internal/base/portable", "internal/client/cluster", "test/bench/images"},
	"github.com/modelcontextprotocol/go-sdk": {"internal/client/cli/mcp", "internal/guest/mcpgateway"},
	"helm.sh/helm":                           {"internal/client/cli/cluster"}, // the syntax of --set alone
	"github.com/docker/cli":                  {"internal/client/cli/build"},   // Docker's configuration alone
	"github.com/moby/buildkit":               {"internal/client/dockerfile"},  // the syntax of Dockerfiles alone
	"github.com/yuin/goldmark":               {"internal/base/docsite"},
	"github.com/bep/goat":                    {"internal/base/docsite"},
	"github.com/moby/patternmatcher":         {"internal/client/dockerfile", "internal/guest/agent"},
}

// pkg is what `go list` tells of a package.
type pkg struct {
	ImportPath, Name, Doc              string
	Imports, TestImports, XTestImports []string
	DepOnly, Incomplete                bool
	Error                              *struct{ Err string }
}

// rel is the path within the module.
func (p pkg) rel() string { return strings.TrimPrefix(p.ImportPath, module+"/") }

func TestArchitecture(t *testing.T) {
	pkgs := list(t)
	if len(pkgs) < 3 {
		t.Fatalf("go list found only %d packages", len(pkgs))
	}
	for _, p := range pkgs {
		for _, fault := range faults(p) {
			t.Error(fault)
		}
	}
}

// TestRules seeds each kind of fault: a rule that catches nothing is no rule.
func TestRules(t *testing.T) {
	tests := map[string]struct {
		give pkg
		want string // part of the only fault; empty for none
	}{
		"sound":              {give: pkg{ImportPath: module + "/internal/node", Imports: []string{"fmt", module + "/internal/node/ctrd"}}},
		"unlisted":           {give: pkg{ImportPath: module + "/internal/util"}, want: "has no layer"},
		"no comment":         {give: pkg{ImportPath: module + "/internal/node", Doc: "-"}, want: "no package comment"},
		"upward":             {give: pkg{ImportPath: module + "/internal/base/errs", Imports: []string{module + "/internal/base/localca"}}, want: "layer 0"},
		"sideways":           {give: pkg{ImportPath: module + "/internal/control/manager", Imports: []string{module + "/internal/control/controllers"}}, want: "layer 5"},
		"across planes":      {give: pkg{ImportPath: module + "/internal/control/controllers", Imports: []string{module + "/internal/node/ipam"}}, want: "plane control may import"},
		"across, in a test":  {give: pkg{ImportPath: module + "/internal/control/controllers", TestImports: []string{module + "/internal/node/ipam"}}},
		"up to the wiring":   {give: pkg{ImportPath: module + "/internal/client/cli", Imports: []string{module + "/internal/daemon"}}, want: "plane client may import"},
		"client's config":    {give: pkg{ImportPath: module + "/internal/client/cli", Imports: []string{module + "/internal/config"}}},
		"unlisted in node":   {give: pkg{ImportPath: module + "/internal/node/util"}, want: "has no layer"},
		"sideways to child":  {give: pkg{ImportPath: module + "/internal/control/cache", Imports: []string{module + "/internal/guest/envd/processpb"}}, want: "layer 3"},
		"upward in a test":   {give: pkg{ImportPath: module + "/internal/base/errs", XTestImports: []string{module + "/internal/client/cli"}}, want: "layer 0"},
		"sideways in a test": {give: pkg{ImportPath: module + "/internal/control/cache", TestImports: []string{module + "/internal/control/apiserver"}}, want: "layer 3"},
		"beside, in a test":  {give: pkg{ImportPath: module + "/internal/control/cache", XTestImports: []string{module + "/internal/control/apiserver"}}},
		"parent to child":    {give: pkg{ImportPath: module + "/internal/guest/envd", Imports: []string{module + "/internal/guest/envd/processpb"}}},
		"sibling":            {give: pkg{ImportPath: module + "/internal/guest/envd/a", Imports: []string{module + "/internal/guest/envd/b"}}},
		"wrong owner":        {give: pkg{ImportPath: module + "/internal/node", Imports: []string{"github.com/containerd/containerd/v2/client"}}, want: "belongs to"},
		"right owner":        {give: pkg{ImportPath: module + "/internal/node/ctrd", Imports: []string{"github.com/containerd/containerd/v2/client"}}},
		"owner's child":      {give: pkg{ImportPath: module + "/internal/control/apiserver/registry", Imports: []string{"k8s.io/apiserver/pkg/server"}}},
		"like an owned":      {give: pkg{ImportPath: module + "/internal/node", Imports: []string{"go.etcd.io/bboltish"}}},
		"agent":              {give: pkg{ImportPath: module + "/cmd/barchan", Imports: []string{module + "/internal/guest/agent"}}, want: "belongs to"},
		"agent's main":       {give: pkg{ImportPath: module + "/cmd/barchan-agent", Imports: []string{module + "/internal/guest/agent"}}},
		"agent's own":        {give: pkg{ImportPath: module + "/internal/guest/agent", Imports: []string{module + "/internal/guest/agent/files"}}},
		"testkit":            {give: pkg{ImportPath: module + "/internal/node", Imports: []string{module + "/internal/testkit"}}, want: "belongs to"},
		"testkit in a test":  {give: pkg{ImportPath: module + "/internal/node", TestImports: []string{module + "/internal/testkit"}}},
		"public client":      {give: pkg{ImportPath: module + "/client", Imports: []string{module + "/internal/guest/envd"}}},
		"client of above":    {give: pkg{ImportPath: module + "/client", Imports: []string{module + "/internal/edge/e2b"}}, want: "layer 4"},
		"client's child":     {give: pkg{ImportPath: module + "/client/interpreter", Imports: []string{module + "/client"}}},
		"unreadable":         {give: pkg{ImportPath: module + "/internal/node", Error: &struct{ Err string }{"no such import"}}, want: "no such import"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			tt.give.Doc = strings.TrimPrefix(cmp.Or(tt.give.Doc, "Package x is."), "-")
			got := faults(tt.give)
			switch {
			case tt.want == "" && len(got) > 0:
				t.Errorf("faults = %q, want none", got)
			case tt.want != "" && (len(got) != 1 || !strings.Contains(got[0], tt.want)):
				t.Errorf("faults = %q, want one with %q", got, tt.want)
			}
		})
	}
}

// TestPlanesNameTheirPackages keeps the overview of each plane whole: a stranger reads it first.
func TestPlanesNameTheirPackages(t *testing.T) {
	for plane := range planes {
		text, err := os.ReadFile(filepath.Join("internal", plane, "doc.go"))
		if err != nil {
			t.Fatal(err)
		}
		files, err := filepath.Glob(filepath.Join("internal", plane, "*", "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		named := map[string]bool{}
		for line := range strings.Lines(string(text)) {
			if list, ok := strings.CutPrefix(line, "//\t"); ok {
				for _, word := range strings.FieldsFunc(list, func(r rune) bool { return r != '-' && !unicode.IsLetter(r) && !unicode.IsDigit(r) }) {
					named[word] = true
				}
			}
		}
		for _, f := range files {
			if name := filepath.Base(filepath.Dir(f)); !named[name] {
				t.Errorf("internal/%s/doc.go does not name the package %s", plane, name)
				named[name] = true
			}
		}
	}
}

// TestLayersAreListedOnce guards the table itself.
func TestLayersAreListedOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range slices.Concat(layers...) {
		if seen[p] {
			t.Errorf("%s is listed twice", p)
		}
		seen[p] = true
	}
	for p := range planes {
		if !seen["internal/"+p] {
			t.Errorf("the plane %s has no package that describes it", p)
		}
	}
	for dep, who := range owners {
		for _, p := range who {
			if !seen[p] {
				t.Errorf("%s is owned by %s, which has no layer", dep, p)
			}
		}
	}
}

// public lists what the public client may depend on, besides the standard library: a program that imports it gets all of this.
var public = []string{
	"client", "internal/base/errs", "internal/guest/envd", "connectrpc.com/connect", "google.golang.org/protobuf", "golang.org/x/time/rate",
}

// TestPublicClientIsLight keeps Kubernetes, containerd and the like out of the programs of those who use the client.
func TestPublicClientIsLight(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "./client/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for imp := range strings.FieldsSeq(string(out)) {
		rel := strings.TrimPrefix(imp, module+"/")
		if !slices.ContainsFunc(public, func(may string) bool { return within(rel, may) }) {
			t.Errorf("client depends on %s: it may depend on %v alone", rel, public)
		}
	}
}

// faults returns what is wrong with a package.
func faults(p pkg) []string {
	if p.Error != nil {
		return []string{fmt.Sprintf("%s cannot be read: %s", p.rel(), p.Error.Err)}
	}
	own, family := place(p.rel())
	if own < 0 {
		return []string{p.rel() + " has no layer: add it to layers in arch_test.go"}
	}
	var found []string
	if p.Doc == "" {
		found = append(found, p.rel()+" has no package comment")
	}
	for _, imp := range p.Imports {
		found = append(found, layerFault(p, own, own-1, family, imp)...)
		found = append(found, planeFault(p, imp)...)
		found = append(found, ownerFault(p, family, imp)...)
	}
	// Tests keep to the layers as well; owners are for what runs. A test from outside the package
	// may stand it on the real part beside it.
	for _, imp := range p.TestImports {
		found = append(found, layerFault(p, own, own-1, family, imp)...)
	}
	for _, imp := range p.XTestImports {
		if imp != p.ImportPath {
			found = append(found, layerFault(p, own, own, family, imp)...)
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// layerFault says what is wrong with an import; most is the highest layer that it may be of.
func layerFault(p pkg, own, most int, family, imp string) []string {
	rel, ours := strings.CutPrefix(imp, module+"/")
	if !ours {
		return nil
	}
	l, its := place(rel)
	if its == family || (l >= 0 && l <= most) {
		return nil
	}
	return []string{fmt.Sprintf("%s (layer %d) imports %s (layer %d): only lower layers may be imported", p.rel(), own, rel, l)}
}

// planeFault says what is wrong with an import that crosses planes.
func planeFault(p pkg, imp string) []string {
	rel, ours := strings.CutPrefix(imp, module+"/internal/")
	own, inside := strings.CutPrefix(p.rel(), "internal/")
	from, to := plane(own), plane(rel)
	may, listed := planes[from]
	if !ours || !inside || !listed || from == to || to == "testkit" || slices.Contains(may, to) {
		return nil
	}
	return []string{fmt.Sprintf("%s imports %s: the plane %s may import %v alone", p.rel(), imp, from, may)}
}

// plane is the first element of a path below internal.
func plane(rel string) string {
	first, _, _ := strings.Cut(rel, "/")
	return first
}

func ownerFault(p pkg, family, imp string) []string {
	var dep string
	for d := range owners {
		if within(imp, d) && len(d) > len(dep) {
			dep = d
		}
	}
	if dep == "" || slices.Contains(owners[dep], family) || within(p.ImportPath, dep) {
		return nil
	}
	return []string{fmt.Sprintf("%s imports %s, which belongs to %v", p.rel(), imp, owners[dep])}
}

// place returns the layer of a package and the listed package that it is part
// of; -1 if there is none.
func place(rel string) (layer int, family string) {
	layer = -1
	for i, l := range layers {
		for _, listed := range l {
			name, inside := strings.CutPrefix(listed, "internal/")
			_, alone := planes[name]
			if (rel == listed || within(rel, listed) && (!inside || !alone)) && len(listed) > len(family) {
				layer, family = i, listed
			}
		}
	}
	return layer, family
}

// within says whether path is parent or below it.
func within(path, parent string) bool {
	return path == parent || strings.HasPrefix(path, parent+"/")
}

// list returns all packages of the module but the root, which is this test, and
// those of the folder test, which hold nothing but tests.
func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-e",
		"-json=ImportPath,Name,Doc,Imports,TestImports,XTestImports,Error", "./...")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, stderr.String())
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		onlyTests := len(p.Imports) == 0 && within(p.rel(), "test")
		if p.ImportPath != module && !onlyTests {
			pkgs = append(pkgs, p)
		}
	}
}
