package scale

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/test/bench/harness"
)

// namespaceSize is the greatest number of sandboxes in a namespace, as quotas have it.
const namespaceSize = 10_000

// model is a sandbox that has run and sleeps, of which there are copies.
type model struct {
	server *harness.Server
	kube   string       // URL of the Kubernetes API
	http   *http.Client // an administrator's

	id   string
	uid  types.UID
	spec map[string]any // object without what the API server sets
	made int            // copies, and the model itself
}

func newModel(ctx context.Context, b *harness.Bench) (*model, error) {
	m := &model{server: b.Server, made: 1}
	cfg, err := clientcmd.BuildConfigFromFlags("", b.Server.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read kubeconfig: %w", err)
	}
	m.kube = cfg.Host
	if m.http, err = rest.HTTPClientFor(cfg); err != nil {
		return nil, fmt.Errorf("make client: %w", err)
	}
	x, err := b.Server.Create(ctx, "gvisor")
	if err != nil {
		return nil, err
	}
	m.id = x.ID
	if err := b.Server.REST.Pause(ctx, x.ID, client.PauseOptions{}); err != nil {
		return nil, err
	}
	var d client.SandboxDetail
	err = harness.Poll(ctx, harness.Tick, "wait until sandbox "+x.ID+" is on disk", func(ctx context.Context) (_ bool, err error) {
		d, err = b.Server.REST.Get(ctx, x.ID)
		return d.Memory == "Disk", err
	})
	if err != nil {
		return nil, err
	}
	text, err := get(ctx, m.http, m.path("default", "sandboxes")+"/"+d.Name, nil)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(text, &m.spec); err != nil {
		return nil, fmt.Errorf("decode sandbox: %w", err)
	}
	meta, _ := m.spec["metadata"].(map[string]any)
	uid, _ := meta["uid"].(string)
	m.uid = types.UID(uid)
	delete(m.spec, "status")
	for _, set := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "name", "generateName"} {
		delete(meta, set)
	}
	return m, nil
}

func (m *model) path(namespace, plural string) string {
	return m.kube + "/apis/agents.x-k8s.io/v1beta1/namespaces/" + namespace + "/" + plural
}

// post makes an object and returns its UID.
func (m *model) post(ctx context.Context, url string, object any) (types.UID, error) {
	body, err := json.Marshal(object)
	if err != nil {
		return "", fmt.Errorf("encode object: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return "", fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := m.http.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusCreated {
		err = fmt.Errorf("POST %s: status %d: %.300s", url, res.StatusCode, text)
	}
	var made struct{ Metadata struct{ UID types.UID } }
	if err == nil {
		err = json.Unmarshal(text, &made)
	}
	return made.Metadata.UID, err
}

// grow makes copies until there are n sandboxes.
func (m *model) grow(ctx context.Context, n int) error {
	refs := make([]sandbox.Ref, max(0, n-m.made))
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(2 * harness.AtOnce)
	for i := range refs {
		number := m.made + i
		ref := &refs[i]
		ref.Namespace, ref.Name = "default", fmt.Sprintf("copy-%06d", number)
		if team := number / namespaceSize; team > 0 {
			ref.Namespace = fmt.Sprintf("team-%d", team)
		}
		if number%namespaceSize == 0 {
			object := map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": ref.Namespace}}
			if _, err := m.post(ctx, m.kube+"/api/v1/namespaces", object); err != nil {
				return errors.Join(err, group.Wait())
			}
		}
		group.Go(func() (err error) {
			ref.UID, err = m.post(groupCtx, m.path(ref.Namespace, "sandboxes"), m.copyFor(ref))
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

// copyFor returns the object of a copy.
func (m *model) copyFor(ref *sandbox.Ref) map[string]any {
	object := map[string]any{}
	for key, value := range m.spec {
		object[key] = value
	}
	meta := map[string]any{}
	if of, ok := m.spec["metadata"].(map[string]any); ok {
		for key, value := range of {
			meta[key] = value
		}
	}
	meta["namespace"], meta["name"] = ref.Namespace, ref.Name
	object["metadata"] = meta
	return object
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
	row, err := rows.Get(m.uid)
	if err != nil || row == nil {
		return fmt.Errorf("the journal has no row of sandbox %s: %w", m.id, err)
	}
	memory := filepath.Join(m.server.Data, "node", "memory")
	files, err := os.ReadDir(filepath.Join(memory, m.id))
	if err != nil {
		return fmt.Errorf("read memory of sandbox %s: %w", m.id, err)
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
				if err := os.Symlink(filepath.Join(memory, m.id, f.Name()), filepath.Join(dir, f.Name())); err != nil {
					return fmt.Errorf("link memory: %w", err)
				}
			}
		}
		return nil
	})
}

// makePool makes a warm pool without members.
func (m *model) makePool(ctx context.Context, number int) error {
	_, err := m.post(ctx, m.kube+"/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxwarmpools", map[string]any{
		"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
		"metadata": map[string]any{"name": fmt.Sprintf("empty-%04d", number), "namespace": "default"},
		"spec":     map[string]any{"replicas": 0, "sandboxTemplateRef": map[string]any{"name": harness.DefaultTemplate}},
	})
	return err
}
