package main

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	asleepAtOnce  = 200
	heldBar       = 64 // KiB
	wakeFreezeBar = 40 // milliseconds
)

// boxOf is the client of a sandbox that was made.
func (s *server) boxOf(made client.Sandbox) (box, error) {
	h := http.Header{}
	h.Set(envd.HeaderSandboxID, made.SandboxID)
	h.Set(envd.HeaderSandboxPort, strconv.Itoa(envd.Port))
	agent, err := envd.NewClient(envd.ClientConfig{
		HTTP: s.http, BaseURL: "http://" + s.addr, Header: h, Token: func() string { return made.AgentToken },
	})
	return box{id: made.SandboxID, agent: agent}, err
}

// wakes has a request wake a sandbox, from RAM and from disk.
func (b *bench) wakes(ctx context.Context) error {
	for _, from := range []struct {
		name, storeAfter string
		bar              float64
	}{{"RAM", "1h", wakeFreezeBar}, {"disk", "1ms", 0}} {
		if err := b.restartWith(ctx, "BARCHAN_STORE_AFTER="+from.storeAfter); err != nil {
			return err
		}
		var made client.Sandbox
		wakeable := map[string]any{"templateID": "bench-gvisor", "timeout": 3600, "autoPause": true, "autoResume": map[string]bool{"enabled": true}}
		if err := b.call(ctx, http.MethodPost, "/sandboxes", wakeable, &made); err != nil {
			return err
		}
		x, err := b.server.boxOf(made)
		if err != nil {
			return err
		}
		if err := b.serve(ctx, x, gapProgram); err != nil {
			return err
		}
		running, err := times(b.rounds(50), func() error {
			_, err := b.visit(ctx, x.id)
			return err
		})
		if err != nil {
			return err
		}
		var took samples
		for i := range b.rounds(30) + 1 {
			ms, err := b.wakeByRequest(ctx, x, from.storeAfter != "1h")
			if err != nil {
				return err
			}
			if i > 0 { // the first one only warms
				took = append(took, ms)
			}
		}
		f := b.report.add("sleep", "request that wakes from "+from.name, "ms", took).over("request to the same sandbox, awake", running.at(0.5))
		if from.bar > 0 {
			f.atMost(from.bar)
		}
		if err := b.server.kill(ctx, x); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) wakeByRequest(ctx context.Context, x box, disk bool) (float64, error) {
	count := 0.0
	if disk {
		var err error
		if count, err = b.storesDone(ctx); err != nil {
			return 0, err
		}
	}
	if err := b.server.rest.Pause(ctx, x.id, client.PauseOptions{}); err != nil {
		return 0, err
	}
	if disk {
		if err := b.awaitStores(ctx, count+1); err != nil {
			return 0, err
		}
	}
	if err := b.awaitStored(ctx, x.id); err != nil {
		return 0, err
	}
	began := time.Now()
	_, err := b.visit(ctx, x.id)
	return millis(time.Since(began)), err
}

// held measures the memory of a restarted server with no and with many sandboxes stored on disk.
func (b *bench) held(ctx context.Context) error {
	n := asleepAtOnce
	if b.quick {
		n /= 10
	}
	empty, err := b.freshServer(ctx)
	if err != nil {
		return err
	}
	boxes, err := b.fill(ctx, "gvisor", n)
	if err != nil {
		return err
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, x := range boxes {
		group.Go(func() error { return b.server.rest.Pause(groupCtx, x.id, client.PauseOptions{}) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if err := b.awaitStores(ctx, float64(n)); err != nil {
		return err
	}
	full, err := b.freshServer(ctx)
	if err != nil {
		return err
	}
	left, err := b.processesOfSandboxes()
	if err != nil {
		return err
	}
	b.report.one("sleep", fmt.Sprintf("server RSS with %d asleep, beyond that with none, each", n), "KiB", 1024*(full-empty)/float64(n)).atMost(heldBar)
	b.report.one("sleep", fmt.Sprintf("processes of %d asleep", n), "", float64(left)).atMost(0)
	if err := b.boots(ctx, fmt.Sprintf("boot to ready, %d asleep", n), b.rounds(10)); err != nil {
		return err
	}
	return b.killAll(ctx, boxes)
}

// freshServer restarts the server, lets it rest, and returns its resident memory in MiB.
func (b *bench) freshServer(ctx context.Context) (float64, error) {
	if _, err := b.server.restart(ctx); err != nil {
		return 0, err
	}
	if err := rest(ctx, settle); err != nil {
		return 0, err
	}
	return residentMiB(b.server.cmd.Process.Pid)
}

// processesOfSandboxes counts what runs in the cgroups of sandboxes.
func (b *bench) processesOfSandboxes() (n int, err error) {
	all, err := processes()
	if err != nil {
		return 0, err
	}
	for _, pid := range all {
		text, err := procFile(pid, "cgroup")
		if err != nil {
			return 0, fmt.Errorf("read cgroup of process %d: %w", pid, err)
		}
		if strings.Contains(text, ":"+b.server.cgroup+"/") {
			n++
		}
	}
	return n, nil
}
