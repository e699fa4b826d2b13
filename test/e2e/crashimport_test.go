package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

var (
	// importSnapshot brings back a checkpoint that left the server, and its sandbox with it. A client that
	// finds half of it there removes that, and imports it again.
	importSnapshot = operation{
		name: "import", storeAfter: neverOnDisk, prepare: departed, check: returned, cleanup: dropAndKill,
		do: func(ctx context.Context, w *fixture, s *subject) error {
			c, err := w.importOf(ctx, s)
			switch {
			case err != nil:
				return err
			case c == nil:
				return w.importSubject(s)
			case c.Status.Phase == barchan.CheckpointReady:
				return nil
			case c.Status.Phase == barchan.CheckpointFailed:
				return errors.Join(errAgain, client.IgnoreNotFound(w.objects.Delete(ctx, c)))
			default: // it is about to fail, or to be ready
				return errAgain
			}
		},
	}
	// importArrived is the same once all of it is there: it then becomes ready automatically.
	importArrived = operation{
		name: "import that has come", storeAfter: neverOnDisk, prepare: departed, check: returned, cleanup: dropAndKill,
		do: func(ctx context.Context, w *fixture, s *subject) error {
			c, err := w.importOf(ctx, s)
			if err == nil && c == nil {
				return w.importSubject(s)
			}
			if err == nil && c.Status.Phase != barchan.CheckpointReady {
				err = fmt.Errorf("checkpoint %s is %q: %+v", c.Name, c.Status.Phase, c.Status.Conditions)
			}
			return err
		},
	}
)

// departed is a subject of which only an artifact is left.
func departed(w *fixture) *subject {
	source := snapshotted("warm")(w)
	w.must("checkpoint", "export", strings.ReplaceAll(snapshotOf(source), ":", "-"), w.artifact(source), "--without-image", "--allow-secrets")
	w.need(dropSubject(w.t.Context(), w, source))
	killSubject(w, source)
	return &subject{name: source.name, nonce: source.nonce}
}

// returned verifies that a sandbox of an import continues where its source was.
func returned(w *fixture, s *subject) {
	w.need(createOf(w.t.Context(), w, s, s.name+":default"))
	if nonce, _ := w.meet(s.id); nonce != s.nonce {
		w.t.Errorf("sandbox %s returned %s, want %s", s.id, nonce, s.nonce)
	}
}

// artifact is the file that the checkpoint of a subject has left in.
func (w *fixture) artifact(s *subject) string { return filepath.Join(w.dir, s.name+".tar") }

// importOf is the object of a subject's import; nil where there is none.
func (w *fixture) importOf(ctx context.Context, s *subject) (*barchan.Checkpoint, error) {
	c := &barchan.Checkpoint{}
	err := w.objects.Get(ctx, client.ObjectKey{Namespace: "default", Name: s.name}, c)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return c, err
}

func (w *fixture) importSubject(s *subject) error {
	if out, err := w.try("checkpoint", "import", w.artifact(s), "--name", s.name); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// imports are the crashes of those operations.
func imports() (all []crash) {
	for at := range strings.FieldsSeq("import/made import/writing import/base import/data") {
		all = append(all, crash{op: importSnapshot, at: at})
	}
	for at := range strings.FieldsSeq("import/ready import/noted checkpointobject/finished") {
		all = append(all, crash{op: importArrived, at: at})
	}
	return append(all, crash{op: importSnapshot, at: "import/data", then: "checkpoint/removed"})
}
