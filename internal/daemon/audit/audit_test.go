package audit

import (
	"context"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/node"
)

// runningSandbox is a sandbox as its object is while it runs.
func runningSandbox(name string) *agents.Sandbox {
	return &agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name), ResourceVersion: "7", Finalizers: []string{agents.NodeFinalizer}},
		Status: agents.SandboxStatus{
			PodIPs:     []string{"10.0.0.2"},
			Conditions: []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}},
		},
	}
}

// whole is a view without a fault: a sandbox that is on the node and has a route, and a claim of it.
func whole() (*view, *agents.Sandbox) {
	s := runningSandbox("a")
	c := extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c", UID: "c"}}
	c.Status.Sandbox.Name = "a"
	c.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	yes := true
	s.OwnerReferences = []metav1.OwnerReference{{Kind: "SandboxClaim", Name: "c", UID: "c", Controller: &yes}}
	v := &view{
		table: route.NewTable(), now: time.Now(), pools: map[types.UID]bool{}, claimList: []extensions.SandboxClaim{c},
		boxes:  map[types.UID]*agents.Sandbox{"a": s},
		named:  map[client.ObjectKey]*agents.Sandbox{client.ObjectKeyFromObject(s): s},
		onNode: map[types.UID]node.Status{"a": {Ref: sandbox.Ref{Namespace: "default", Name: "a", UID: "a"}}},
	}
	v.table.Apply(s)
	return v, s
}

func TestAuditOfObjects(t *testing.T) {
	for name, tt := range map[string]struct {
		spoil func(v *view, s *agents.Sandbox)
		want  []string // a part of each finding, in their order
	}{
		"whole": {func(*view, *agents.Sandbox) {}, nil},
		"not on the node": {
			func(v *view, _ *agents.Sandbox) { clear(v.onNode) },
			[]string{"is Running by its object, and the node does not have it"},
		},
		"starting": {
			func(v *view, s *agents.Sandbox) {
				clear(v.onNode)
				s.Status = agents.SandboxStatus{}
				v.table = route.NewTable()
				v.table.Apply(s)
				v.claimList[0].Status.Conditions = nil
			}, nil,
		},
		"object gone": {
			func(v *view, s *agents.Sandbox) {
				v.table.ApplyDelete(s)
				clear(v.boxes)
				clear(v.named)
				v.claimList = nil
			},
			[]string{"default/a is on the node, and its object a is gone"},
		},
		"object gone, and its route stays": {
			func(v *view, _ *agents.Sandbox) {
				clear(v.onNode)
				clear(v.boxes)
			},
			[]string{"remains without an object"},
		},
		"nothing holds it": {
			func(_ *view, s *agents.Sandbox) { s.Finalizers = nil },
			[]string{"nothing holds its object"},
		},
		"going for long": {
			func(v *view, s *agents.Sandbox) {
				s.DeletionTimestamp = &metav1.Time{Time: v.now.Add(-longGone - time.Second)}
				v.table.ApplyDelete(s)
			},
			[]string{"is being deleted since"},
		},
		"going": {
			func(v *view, s *agents.Sandbox) {
				s.DeletionTimestamp = &metav1.Time{Time: v.now.Add(-time.Second)}
				v.table.ApplyDelete(s)
			}, nil,
		},
		"member of nothing": {
			func(v *view, s *agents.Sandbox) {
				s.Labels = map[string]string{agents.LabelWarmPoolSandbox: "p"}
				v.table.ApplyDelete(s)
			},
			[]string{"is a member of a warm pool that does not exist"},
		},
		"claim without its sandbox": {
			func(v *view, _ *agents.Sandbox) { clear(v.named) },
			[]string{"claim default/c is ready with sandbox a, which does not exist"},
		},
		"claim of another's": {
			func(_ *view, s *agents.Sandbox) { s.OwnerReferences = nil },
			[]string{"claim default/c names sandbox a, which is not its own"},
		},
		"sandbox of no claim": {
			func(v *view, _ *agents.Sandbox) { v.claimList = nil },
			[]string{"sandbox default/a belongs to claim c, which does not exist"},
		},
		"no route": {
			func(v *view, _ *agents.Sandbox) { v.table = route.NewTable() },
			[]string{"sandbox default/a has no route"},
		},
		"route elsewhere": {
			func(v *view, s *agents.Sandbox) {
				r, _ := route.FromSandbox(s)
				r.Address = netip.MustParseAddr("10.0.0.9")
				v.table = route.NewTable()
				v.table.Upsert(r)
			},
			[]string{"goes to 10.0.0.9, Running; it is at 10.0.0.2, Running"},
		},
		"route of a member": {
			func(v *view, s *agents.Sandbox) {
				v.pools["p"] = true
				s.Labels = map[string]string{agents.LabelWarmPoolSandbox: "p"}
			},
			[]string{"must have no route, and has one"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			v, s := whole()
			tt.spoil(v, s)
			found := slices.Concat(v.sandboxes(), v.claims(), v.compareRoutes())
			if len(found) != len(tt.want) {
				t.Fatalf("found %+v, want %q", found, tt.want)
			}
			for i, f := range found {
				if !strings.Contains(f.What, tt.want[i]) || f.Remedy == "" || f.Where == "" {
					t.Errorf("found %+v, want %q", f, tt.want[i])
				}
			}
		})
	}
}

func TestStrayFiles(t *testing.T) {
	dir := t.TempDir()
	cfg := &config.Config{DataDir: dir, RunDir: filepath.Join(dir, "run")}
	var want []string
	for path, stray := range map[string]bool{
		"credentials/api-key": false, "credentials/.api-key-12": true, "last-start.yaml": false, ".last-start.yaml-3": true,
		"node/sandboxes/x/rootfs/.profile": false, "node/claims/x/data/a.tmp": false, "apiserver/etcd/member/wal/0.tmp": false,
		"containerd/root/.x": false, "run/admin.sock.new": false, "tls/ca.crt.tmp": true, "node/.new-1": true, "node/memory/x/.y": false,
	} {
		file := filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if stray {
			want = append(want, file)
		}
	}
	got, err := strayFiles(cfg)
	slices.Sort(got)
	slices.Sort(want)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("stray files %q, %v, want %q", got, err, want)
	}
	if err := SweepFiles(cfg); err != nil {
		t.Fatal(err)
	}
	got, err = strayFiles(cfg)
	if want := []string{filepath.Join(dir, "tls/ca.crt.tmp")}; err != nil || !slices.Equal(got, want) {
		t.Errorf("after the sweep: %q, %v, want %q, which we do not write", got, err, want)
	}
}

// TestTwoPasses: only findings of both passes count; without findings in the first there is no wait.
func TestTwoPasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kept, goes, comes := adminclient.Finding{What: "kept"}, adminclient.Finding{What: "goes"}, adminclient.Finding{What: "comes"}
		passes := [][]adminclient.Finding{{goes, kept}, {kept, comes}}
		pass := func(context.Context) (found []adminclient.Finding, _ error) {
			found, passes = passes[0], passes[1:]
			return found, nil
		}
		began := time.Now()
		if found, err := twice(t.Context(), pass); err != nil || !slices.Equal(found, []adminclient.Finding{kept}) {
			t.Errorf("found %v, %v", found, err)
		}
		if apart := time.Since(began); apart != auditApart {
			t.Errorf("the passes were %v apart", apart)
		}
		passes, began = [][]adminclient.Finding{nil}, time.Now()
		if found, err := twice(t.Context(), pass); err != nil || len(found) > 0 || time.Since(began) > 0 {
			t.Errorf("found %v, %v after %v", found, err, time.Since(began))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		passes = [][]adminclient.Finding{{kept}}
		if found, err := twice(ctx, pass); err == nil {
			t.Errorf("found %v", found)
		}
	})
}
