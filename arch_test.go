// Package barchan_test checks the rules that hold for the whole module: who may
// import whom, and that every package says what it is for.
package barchan_test

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/barchan-dev/barchan"

// layers lists the packages, lowest layer first. A package may import packages of
// lower layers, and of its own family: the packages below its own listed one. So
// parts of one layer never know each other. A package below a listed one, such
// as internal/envd/processpb, is in the layer of its nearest listed parent.
var layers = [][]string{
	0: {"api/agents/v1beta1", "internal/errs", "internal/lifecycle", "internal/telemetry", "internal/failpoint", "internal/testkit/eventually"},
	1: {"api/extensions/v1beta1", "api/barchan/v1alpha1", "internal/sandbox", "internal/durable", "internal/egress", "internal/health"},
	2: {"api/openapi", "internal/ipam", "internal/migrate", "internal/route", "internal/localca", "internal/pool", "internal/portable"},
	3: {
		"internal/apiserver", "internal/cache", "internal/ctrd", "internal/oci", "internal/netdev",
		"internal/peers", "internal/envd", "internal/baseimage", "internal/toolchain",
		"internal/adminclient", "internal/restclient", "internal/picker", "internal/quota", "internal/resolver", "internal/acme", "internal/testkit",
	},
	4: {"internal/controllers", "internal/node", "internal/manager", "internal/gateway", "internal/agent", "internal/testkit/claimsuite"},
	5: {"internal/e2b", "internal/adminapi", "internal/config"},
	6: {"internal/daemon"},
	7: {"internal/cli"},
	8: {"cmd/barchan", "cmd/barchan-agent"},
	9: {"test/bench"},
}

// owners names, for a dependency that is heavy or dangerous, the packages that
// may import it. Prefixes of import paths; the longest that fits decides.
var owners = map[string][]string{
	"k8s.io/apiserver":                       {"internal/apiserver"},
	"k8s.io/apiextensions-apiserver":         {"internal/apiserver"},
	"k8s.io/cri-streaming":                   {"internal/apiserver"},
	"k8s.io/streaming":                       {"internal/apiserver"},
	"go.etcd.io/etcd":                        {"internal/apiserver"},
	"go.etcd.io/bbolt":                       {"internal/ipam", "internal/node"},
	"github.com/containerd/containerd":       {"internal/ctrd"},
	"github.com/containerd/errdefs":          {"internal/ctrd"},
	"github.com/containerd/platforms":        {"internal/ctrd"},
	"github.com/containerd/typeurl":          {"internal/ctrd"},
	"github.com/containerd/go-runc":          {"internal/oci"},
	"gvisor.dev/gvisor":                      {}, // a program to us, never a library
	"github.com/vishvananda/netlink":         {"internal/netdev"},
	"github.com/vishvananda/netns":           {"internal/netdev"},
	"github.com/google/nftables":             {"internal/netdev"},
	"github.com/mdlayher/netlink":            {"internal/netdev"},
	module + "/internal/agent":               {"cmd/barchan-agent"},
	module + "/internal/testkit":             {}, // tests alone
	"github.com/hashicorp/memberlist":        {"internal/peers"},
	"github.com/miekg/dns":                   {"internal/resolver"},
	"golang.org/x/crypto/acme":               {"internal/acme"},
	"github.com/spf13/cobra":                 {"internal/cli"},
	"github.com/google/go-containerregistry": {"internal/baseimage", "internal/ctrd", "internal/portable"},
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
		"sound":              {give: pkg{ImportPath: module + "/internal/node", Imports: []string{"fmt", module + "/internal/ctrd"}}},
		"unlisted":           {give: pkg{ImportPath: module + "/internal/util"}, want: "has no layer"},
		"no comment":         {give: pkg{ImportPath: module + "/internal/node", Doc: "-"}, want: "no package comment"},
		"upward":             {give: pkg{ImportPath: module + "/internal/errs", Imports: []string{module + "/internal/route"}}, want: "layer 0"},
		"sideways":           {give: pkg{ImportPath: module + "/internal/node", Imports: []string{module + "/internal/gateway"}}, want: "layer 4"},
		"sideways to child":  {give: pkg{ImportPath: module + "/internal/cache", Imports: []string{module + "/internal/envd/processpb"}}, want: "layer 3"},
		"upward in a test":   {give: pkg{ImportPath: module + "/internal/errs", XTestImports: []string{module + "/internal/cli"}}, want: "layer 0"},
		"sideways in a test": {give: pkg{ImportPath: module + "/internal/cache", TestImports: []string{module + "/internal/apiserver"}}, want: "layer 3"},
		"beside, in a test":  {give: pkg{ImportPath: module + "/internal/cache", XTestImports: []string{module + "/internal/apiserver"}}},
		"parent to child":    {give: pkg{ImportPath: module + "/internal/envd", Imports: []string{module + "/internal/envd/processpb"}}},
		"sibling":            {give: pkg{ImportPath: module + "/internal/envd/a", Imports: []string{module + "/internal/envd/b"}}},
		"wrong owner":        {give: pkg{ImportPath: module + "/internal/node", Imports: []string{"github.com/containerd/containerd/v2/client"}}, want: "belongs to"},
		"right owner":        {give: pkg{ImportPath: module + "/internal/ctrd", Imports: []string{"github.com/containerd/containerd/v2/client"}}},
		"owner's child":      {give: pkg{ImportPath: module + "/internal/apiserver/registry", Imports: []string{"k8s.io/apiserver/pkg/server"}}},
		"like an owned":      {give: pkg{ImportPath: module + "/internal/node", Imports: []string{"go.etcd.io/bboltish"}}},
		"agent":              {give: pkg{ImportPath: module + "/cmd/barchan", Imports: []string{module + "/internal/agent"}}, want: "belongs to"},
		"agent's main":       {give: pkg{ImportPath: module + "/cmd/barchan-agent", Imports: []string{module + "/internal/agent"}}},
		"agent's own":        {give: pkg{ImportPath: module + "/internal/agent", Imports: []string{module + "/internal/agent/files"}}},
		"testkit":            {give: pkg{ImportPath: module + "/internal/node", Imports: []string{module + "/internal/testkit"}}, want: "belongs to"},
		"testkit in a test":  {give: pkg{ImportPath: module + "/internal/node", TestImports: []string{module + "/internal/testkit"}}},
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

// TestLayersAreListedOnce guards the table itself.
func TestLayersAreListedOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range slices.Concat(layers...) {
		if seen[p] {
			t.Errorf("%s is listed twice", p)
		}
		seen[p] = true
	}
	for dep, who := range owners {
		for _, p := range who {
			if !seen[p] {
				t.Errorf("%s is owned by %s, which has no layer", dep, p)
			}
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
			if within(rel, listed) && len(listed) > len(family) {
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
