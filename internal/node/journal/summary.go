package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"time"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// Summary is a row without the sandbox's specification.
type Summary struct {
	Ref sandbox.Ref
	ID  sandbox.ID
	// Stage is empty for a row that this version cannot read, which has only the UID.
	Stage               Stage
	Address             netip.Addr
	StartedAt, PausedAt time.Time
}

// Summary returns the summary of a row.
func (r *Row) Summary() Summary {
	return Summary{Ref: r.Plan.Ref, ID: r.Plan.ID, Stage: r.Stage, Address: r.Address, StartedAt: r.StartedAt, PausedAt: r.PausedAt}
}

// Summaries returns a summary of each row, in the order of the UIDs.
func (j *Journal) Summaries() (out []Summary, err error) {
	err = each(j.db, decodeSummary, func(s Summary) { out = append(out, s) }, func(key, _ []byte, _ error) {
		out = append(out, Summary{Ref: sandbox.Ref{UID: types.UID(key)}})
	})
	return out, err
}

// decodeSummary decodes the parts of a row that a summary has, which takes a fraction of the time of the whole.
func decodeSummary(key, value []byte) (Summary, error) {
	var part struct {
		Stage Stage `json:"stage"`
		Plan  struct {
			Ref sandbox.Ref `json:"ref"`
			ID  sandbox.ID  `json:"id"`
		} `json:"plan"`
		Address   netip.Addr         `json:"address"`
		StartedAt time.Time          `json:"startedAt"`
		PausedAt  time.Time          `json:"pausedAt"`
		Kept      agents.SuspendMode `json:"kept"`
	}
	if err := json.Unmarshal(value, &part); err != nil {
		return Summary{}, fmt.Errorf("decode: %w", err)
	}
	r := Row{
		Stage: part.Stage, Plan: plan.Plan{Ref: part.Plan.Ref, ID: part.Plan.ID}, Address: part.Address,
		StartedAt: part.StartedAt, PausedAt: part.PausedAt, Kept: part.Kept,
	}
	return r.Summary(), r.check(key)
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
