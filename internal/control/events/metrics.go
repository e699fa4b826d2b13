package events

import (
	"encoding/json"
	"fmt"
	"time"

	bolt "go.etcd.io/bbolt"
)

// maxSteps bounds the samples of an interval.
const maxSteps = 100

// Sample is how many sandboxes of a namespace ran at a time, and how many were started a second in the step that ends with it.
type Sample struct {
	At      time.Time
	Running int
	Rate    float64
}

// Samples returns samples of an interval, as far as the log goes back. The end is not included.
func (s *Store) Samples(namespace string, start, end time.Time) ([]Sample, error) {
	step := max(end.Sub(start)/maxSteps, 5*time.Second).Truncate(time.Second)
	var list []Sample
	for at := start.Add(step); at.Before(end); at = at.Add(step) {
		list = append(list, Sample{At: at})
	}
	if at := end; len(list) == 0 || list[len(list)-1].At.Before(at) {
		list = append(list, Sample{At: at})
	}
	err := s.db.View(func(tx *bolt.Tx) error { return fill(tx, namespace, list, step) })
	if err != nil {
		return nil, fmt.Errorf("read metrics of %s: %w", namespace, err)
	}
	return list, nil
}

// fill counts backwards, from what runs now.
func fill(tx *bolt.Tx, namespace string, list []Sample, step time.Duration) error {
	running, err := runningIn(tx, namespace)
	if err != nil {
		return err
	}
	next := len(list) - 1 // the newest sample that is not counted
	count := func(from time.Time) {
		for ; next >= 0 && !from.After(list[next].At); next-- {
			list[next].Running = max(running, 0)
		}
	}
	if log := logOf(tx, namespace); log != nil {
		c := log.Cursor()
		for k, v := c.Last(); k != nil && next >= 0; k, v = c.Prev() {
			var e Event
			if err := json.Unmarshal(v, &e); err != nil {
				return err
			}
			count(e.Timestamp)
			if after := next + 1; e.change() > 0 && after < len(list) && e.Timestamp.After(list[after].At.Add(-step)) {
				list[after].Rate += 1 / step.Seconds()
			}
			running -= e.change()
		}
	}
	count(time.Time{})
	return nil
}

// change returns by how much an event changes the number of running sandboxes.
func (e *Event) change() int {
	switch {
	case e.Type == Created || e.Type == Resumed:
		return 1
	case e.Type == Paused || e.Type == Killed && e.Data != nil && e.Data.Execution != nil:
		return -1
	}
	return 0
}

func runningIn(tx *bolt.Tx, namespace string) (n int, err error) {
	err = tx.Bucket(bucketSandboxes).ForEach(func(_, v []byte) error {
		var s state
		if err := json.Unmarshal(v, &s); err != nil {
			return err
		}
		if s.Namespace == namespace && !s.Paused {
			n++
		}
		return nil
	})
	return n, err
}
