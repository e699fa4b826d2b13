package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"time"
)

// coldCreateBar is the median, in milliseconds, that a cold create shall keep to.
const coldCreateBar = 250

// outside names what a create takes beside the node's work: the API's writes, the controller,
// the watch.
const outside = "outside the node"

const (
	// lastUndone is the step that is undone when all others are.
	lastUndone = "address"
	// goneTick is how often the server is polled for it.
	goneTick = 5 * time.Millisecond
)

// measureCreate makes sandboxes one after another, has each print something, and kills it.
func measureCreate(ctx context.Context, b *bench) error {
	for _, class := range b.server.classes {
		bare, err := b.bareContainers(ctx, class, b.rounds(20))
		if err != nil {
			return err
		}
		if err := b.createOf(ctx, class, bare.at(0.5)); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) createOf(ctx context.Context, class string, bare float64) error {
	if err := b.warm(ctx, class); err != nil {
		return err
	}
	before, err := b.stepTimes(ctx, class)
	if err != nil {
		return err
	}
	var created, output, killed, gone samples
	for range b.rounds(50) {
		began := time.Now()
		x, err := b.server.create(ctx, class)
		if err != nil {
			return err
		}
		created = append(created, millis(time.Since(began)))
		first, err := x.run(ctx, "echo", "here")
		if err != nil {
			return err
		}
		output = append(output, millis(first.output.Sub(began)))
		began = time.Now()
		if err := b.server.kill(ctx, x); err != nil {
			return err
		}
		killed = append(killed, millis(time.Since(began)))
		if err := b.awaitGone(ctx, class); err != nil {
			return err
		}
		gone = append(gone, millis(time.Since(began)))
	}
	after, err := b.stepTimes(ctx, class)
	if err != nil {
		return err
	}
	name := "bare " + class + " container, run to its end"
	f := b.report.add("create", "cold create by REST to agent ready, "+class, "ms", created).over(name, bare)
	if class == "gvisor" {
		f.atMost(coldCreateBar)
	}
	b.report.add("create", "create to first output, "+class, "ms", output).over(name, bare)
	b.report.add("create", "kill, until answered, "+class, "ms", killed)
	b.report.add("create", "kill, until nothing of it is left, "+class, "ms", gone)
	b.shares(class, before, after, created.mean())
	return nil
}

// warm makes one sandbox, so that the first to come meets the caches that all others meet.
func (b *bench) warm(ctx context.Context, class string) error {
	x, err := b.server.create(ctx, class)
	if err != nil {
		return err
	}
	if err := b.server.kill(ctx, x); err != nil {
		return err
	}
	return b.awaitGone(ctx, class)
}

// awaitGone returns when all sandboxes of a class that were made are also undone, so that the
// end of one does not burden the beginning of the next.
func (b *bench) awaitGone(ctx context.Context, class string) error {
	return b.awaitUndone(ctx, class, func(now map[string]stepTime) bool {
		return now["undo_"+lastUndone].count >= now["total"].count
	})
}

func (b *bench) awaitUndone(ctx context.Context, class string, enough func(now map[string]stepTime) bool) error {
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	for {
		now, err := b.stepTimes(ctx, class)
		if err != nil {
			return err
		}
		if enough(now) {
			return nil
		}
		if err := rest(ctx, goneTick); err != nil {
			return fmt.Errorf("wait for the end of a killed sandbox: %w", err)
		}
	}
}

// stepTime is what a histogram of the server knows of a step.
type stepTime struct{ seconds, count float64 }

// stepNames are the reported steps, in their order.
var stepNames = []string{
	"image", "journal", "address", "network", "snapshot", "mount", "bundle", "record", "start", "agent", "hold",
}

var stepLine = regexp.MustCompile(`^barchan_node_step_seconds_(sum|count)\{runtime="([^"]+)",step="([^"]+)"\} (\S+)$`)

// stepTimes reads the server's metrics.
func (b *bench) stepTimes(ctx context.Context, class string) (map[string]stepTime, error) {
	res, err := b.server.get(ctx, "/metrics")
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	times, err := readSteps(res.Body, class)
	if err == nil && times["total"].count == 0 {
		err = fmt.Errorf("the server's metrics have no barchan_node_step_seconds of %s", class)
	}
	return times, err
}

func readSteps(r io.Reader, class string) (map[string]stepTime, error) {
	times := map[string]stepTime{}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		m := stepLine.FindStringSubmatch(lines.Text())
		if m == nil || m[2] != class {
			continue
		}
		v, err := strconv.ParseFloat(m[4], 64)
		if err != nil {
			return nil, fmt.Errorf("read metric %q: %w", lines.Text(), err)
		}
		t := times[m[3]]
		if m[1] == "sum" {
			t.seconds = v
		} else {
			t.count = v
		}
		times[m[3]] = t
	}
	return times, lines.Err()
}

// shares puts the mean of each step per create into the report. whole is the mean of a create
// as its client sees it, in milliseconds.
func (b *bench) shares(class string, before, after map[string]stepTime, whole float64) {
	creates := after["total"].count - before["total"].count
	per := func(name string) float64 { return 1000 * (after[name].seconds - before[name].seconds) / creates }
	add := func(name string, mean float64) {
		b.report.Steps = append(b.report.Steps, step{Class: class, Name: name, Mean: mean, Share: mean / whole})
	}
	for _, name := range stepNames {
		add(name, per(name))
	}
	add("the node's whole", per("total"))
	add(outside, whole-per("total"))
	add("create by REST", whole)
}
