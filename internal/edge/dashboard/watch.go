package dashboard

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/edge/dashboard/timeline"
)

const (
	rowsAtOnce = 200
	// sendEvery is the least time between two messages, so that a page draws what changes at once in one go.
	sendEvery = 40 * time.Millisecond
	beatEvery = 15 * time.Second
	sendTime  = 30 * time.Second
)

// row is what the list shows of a sandbox.
type row struct {
	ID       sandbox.ID        `json:"id"`
	Name     string            `json:"name"`
	Template string            `json:"template,omitempty"`
	Phase    sandbox.Phase     `json:"phase"`
	Reason   string            `json:"reason,omitempty"` // why it is not ready
	Memory   string            `json:"memory,omitempty"` // where that of a paused one is
	Member   bool              `json:"member,omitempty"` // of a pool, without an owner
	Launch   string            `json:"launch,omitempty"` // cold or warm
	From     string            `json:"from,omitempty"`   // the checkpoint that it started from
	Parent   string            `json:"parent,omitempty"` // the ID of the sandbox that it is a fork of
	CPUs     int               `json:"cpus"`
	MemoryMB int64             `json:"memoryMB"`
	Metadata map[string]string `json:"metadata,omitempty"`
	Created  time.Time         `json:"created"`
	Started  time.Time         `json:"started,omitzero"`
	Ends     time.Time         `json:"ends,omitzero"`
}

// message is one line of the watch: rows that are new or have changed, IDs of those that are gone.
type message struct {
	Rows   []row        `json:"rows,omitempty"`
	Gone   []sandbox.ID `json:"gone,omitempty"`
	Synced bool         `json:"synced,omitempty"` // all that existed at the start have been sent
	At     time.Time    `json:"at"`
}

func (s *Server) rowOf(o *agents.Sandbox) row {
	v := s.cfg.View(o)
	r := row{
		ID: v.ID, Name: o.Name, Template: v.TemplateName, Phase: v.Phase, Reason: timeline.WaitReason(o), Memory: string(v.Memory),
		Member: pool.MemberOf(o) != "", Launch: o.Labels[agents.LabelLaunchType], CPUs: v.Size.CPUs, MemoryMB: v.Size.MemoryMB,
		Metadata: v.Metadata, Created: barchan.CreatedAt(o), Parent: o.Annotations[pool.AnnotationForkedFrom],
	}
	if b := o.Spec.Barchan; b != nil && b.Restore != nil {
		r.From = b.Restore.CheckpointName
	}
	if v.Phase == sandbox.Running || v.Phase == sandbox.Paused {
		r.Started = v.StartedAt
	}
	if !v.EndAt.Equal(sandboxes.Never) && v.Phase != sandbox.Paused {
		r.Ends = v.EndAt
	}
	return r
}

// watch streams the sandboxes of the session's namespace, and then their changes, as lines of JSON.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, who caller) error {
	p, err := s.hub.subscribe(who.Namespace)
	if err != nil {
		return err
	}
	defer s.hub.unsubscribe(p)
	all, err := s.cfg.Cache.Sandboxes(r.Context(), who.Namespace)
	if err != nil {
		return err
	}
	ctx, cancel := s.live(r.Context(), who)
	defer cancel()
	out := newLines(w)
	for chunk := range slices.Chunk(all, rowsAtOnce) {
		m := message{At: time.Now()}
		for _, o := range chunk {
			m.Rows = append(m.Rows, s.rowOf(o))
		}
		if err := out.send(m); err != nil {
			return err
		}
	}
	if err := out.send(message{Synced: true, At: time.Now()}); err != nil {
		return err
	}
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return errSent
		case <-beat.C:
			err = out.send(message{At: time.Now()})
		case <-p.wake:
			err = s.sendChanges(out, p)
			lifecycle.Sleep(ctx, sendEvery)
		}
		if err != nil {
			return err
		}
	}
}

func (s *Server) sendChanges(out *lines, p *subscriber) error {
	changed, gone := p.take()
	m := message{At: time.Now()}
	for _, uid := range gone {
		m.Gone = append(m.Gone, sandbox.IDOf(uid))
	}
	for _, o := range changed {
		if m.Rows = append(m.Rows, s.rowOf(o)); len(m.Rows) == rowsAtOnce {
			if err := out.send(m); err != nil {
				return err
			}
			m = message{At: time.Now()}
		}
	}
	return out.send(m)
}

// lines is a stream of JSON lines.
type lines struct {
	to  http.ResponseWriter
	rc  *http.ResponseController
	enc *json.Encoder
}

func newLines(w http.ResponseWriter) *lines {
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("X-Accel-Buffering", "no") // for a proxy before the server
	return &lines{to: w, rc: http.NewResponseController(w), enc: json.NewEncoder(w)}
}

// send writes and flushes a line. A reader that does not take it in time is cut off.
func (l *lines) send(v any) error {
	_ = l.rc.SetWriteDeadline(time.Now().Add(sendTime)) // HTTP/2 and tests may lack it
	err := l.enc.Encode(v)
	if err == nil {
		err = l.rc.Flush()
	}
	_ = l.rc.SetWriteDeadline(time.Time{})
	if err != nil {
		return errors.Join(errSent, err)
	}
	return nil
}
