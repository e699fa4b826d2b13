package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Summary is a row without the sandbox's specification.
type Summary struct {
	Ref sandbox.Ref
	ID  sandbox.ID
	// Stage is empty for a row that this version cannot read, which has only the UID.
	Stage               Stage
	StartedAt, PausedAt time.Time
}

// Summaries returns a summary of each row, in the order of the UIDs.
func (j *Journal) Summaries() ([]Summary, error) {
	var out []Summary
	err := j.Each(func(r *Row) {
		out = append(out, Summary{Ref: r.Plan.Ref, ID: r.Plan.ID, Stage: r.Stage, StartedAt: r.StartedAt, PausedAt: r.PausedAt})
	}, func(key, _ []byte, _ error) {
		out = append(out, Summary{Ref: sandbox.Ref{UID: types.UID(key)}})
	})
	return out, err
}

// ReadSummaries reads the database of a node that does not run, and changes nothing. A missing file has no rows. It waits up
// to a second for a node that has the database open, and then returns an error.
func ReadSummaries(path string) (out []Summary, err error) {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: time.Second, ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	none := false
	err = db.View(func(tx *bolt.Tx) error { none = tx.Bucket(sandboxesBucket) == nil; return nil })
	if err != nil || none {
		return nil, err
	}
	return (&Journal{db: db}).Summaries()
}
