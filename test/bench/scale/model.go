package scale

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/go-logr/logr"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	kube "sigs.k8s.io/controller-runtime/pkg/client"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/test/bench/harness"
)

// namespaceSize is the greatest number of sandboxes in a namespace, as quotas have it.
const namespaceSize = 10_000

// model is a sandbox that has run and is stored, of which there are copies.
type model struct {
	server *harness.Server
	kube   kube.Client
	url    string       // of the Kubernetes API
	http   *http.Client // an administrator's

	sandbox agents.Sandbox
	made    int // copies, and the model itself
}

func newModel(ctx context.Context, b *harness.Bench) (*model, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", b.Server.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	cfg.QPS = -1
	crlog.SetLogger(logr.Discard())
	m := &model{server: b.Server, made: 1, url: cfg.Host}
	if m.http, err = rest.HTTPClientFor(cfg); err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), agents.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	if m.kube, err = kube.New(cfg, kube.Options{Scheme: scheme, HTTPClient: m.http}); err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	x, err := b.Server.Create(ctx, "gvisor")
	if err != nil {
		return nil, err
	}
	if err := b.Server.REST.Pause(ctx, x.ID, client.PauseOptions{}); err != nil {
		return nil, err
	}
	var d client.SandboxDetail
	err = harness.Poll(ctx, harness.Tick, "wait until sandbox "+x.ID+" is on disk", func(ctx context.Context) (_ bool, err error) {
		d, err = b.Server.REST.Get(ctx, x.ID)
		return err == nil && d.Memory == "Disk", err
	})
	if err != nil {
		return nil, err
	}
	return m, m.kube.Get(ctx, kube.ObjectKey{Namespace: "default", Name: d.Name}, &m.sandbox)
}

// grow makes copies until there are n sandboxes.
func (m *model) grow(ctx context.Context, n int) error {
	refs := make([]sandbox.Ref, max(0, n-m.made))
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(2 * harness.AtOnce)
	for i := range refs {
		number, of := m.made+i, &m.sandbox
		s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: fmt.Sprintf("copy-%06d", number),
			Labels: of.Labels, Annotations: of.Annotations, Finalizers: of.Finalizers,
		}, Spec: of.Spec}
		if team := number / namespaceSize; team > 0 {
			s.Namespace = fmt.Sprintf("team-%d", team)
			if number%namespaceSize == 0 {
				if err := m.kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.Namespace}}); err != nil {
					return errors.Join(err, group.Wait())
				}
			}
		}
		group.Go(func() error {
			err := m.kube.Create(groupCtx, s)
			refs[i] = sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	m.made = max(n, m.made)
	_, err := m.server.Restart(ctx, func() error { return m.addRows(refs) })
	return err
}

// addRows gives copies what a node has of a sandbox that sleeps: a row and its memory. The server must not run.
func (m *model) addRows(refs []sandbox.Ref) error {
	db, err := bolt.Open(filepath.Join(m.server.Data, "node", "node.db"), 0o600, nil)
	if err != nil {
		return fmt.Errorf("open the node's database: %w", err)
	}
	rows, err := journal.Open(db)
	if err == nil {
		err = m.copyRow(db, rows, refs)
	}
	return errors.Join(err, db.Close())
}

func (m *model) copyRow(db *bolt.DB, rows *journal.Journal, refs []sandbox.Ref) error {
	row, err := rows.Get(m.sandbox.UID)
	if err != nil || row == nil {
		return fmt.Errorf("the journal has no row of sandbox %s: %w", m.sandbox.Name, err)
	}
	id := string(row.Plan.ID)
	memory := filepath.Join(m.server.Data, "node", "memory")
	files, err := os.ReadDir(filepath.Join(memory, id))
	if err != nil {
		return fmt.Errorf("read memory of sandbox %s: %w", id, err)
	}
	row.Address = netip.Addr{} // as where addresses of sandboxes on disk are released: there are fewer than sandboxes
	return db.Update(func(tx *bolt.Tx) error {
		bucket := tx.Bucket([]byte("sandboxes"))
		for _, ref := range refs {
			row.Plan.Ref, row.Plan.ID = ref, sandbox.IDOf(ref.UID)
			row.Plan.Hostname = ref.Name
			text, err := json.Marshal(row)
			if err != nil {
				return fmt.Errorf("encode row: %w", err)
			}
			if err := bucket.Put([]byte(ref.UID), text); err != nil {
				return fmt.Errorf("write row: %w", err)
			}
			dir := filepath.Join(memory, string(row.Plan.ID))
			if err := os.Mkdir(dir, 0o700); err != nil {
				return fmt.Errorf("make directory of memory: %w", err)
			}
			for _, f := range files {
				if err := os.Symlink(filepath.Join(memory, id, f.Name()), filepath.Join(dir, f.Name())); err != nil {
					return fmt.Errorf("link memory: %w", err)
				}
			}
		}
		return nil
	})
}
