package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	transferSize = 256 << 20
	// downloadBar is the median, in megabytes a second, that a download shall reach.
	downloadBar = 200
)

// measureTransfer carries a file to a sandbox and back, beside a plain copy of the same size.
func measureTransfer(ctx context.Context, b *bench) error {
	content := make([]byte, transferSize)
	if _, err := rand.Read(content); err != nil {
		return fmt.Errorf("make content: %w", err)
	}
	copied, err := b.plainCopies(ctx, content, b.rounds(10))
	if err != nil {
		return err
	}
	b.report.add("transfer", "plain copy, dd on the same disk", "MB/s", copied)
	for _, class := range b.server.classes {
		if err := b.transferOf(ctx, class, content, copied.at(0.5)); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) transferOf(ctx context.Context, class string, content []byte, bare float64) error {
	x, err := b.server.create(ctx, class)
	if err != nil {
		return err
	}
	const file = "/home/user/bench"
	n := b.rounds(10)
	up, err := rates(n, func() error {
		_, err := x.agent.Upload(ctx, file, bytes.NewReader(content), nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("upload: %w", err)
	}
	if err := x.compare(ctx, file, content); err != nil {
		return err
	}
	down, err := rates(n, func() error { return x.download(ctx, file, io.Discard) })
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	const name = "plain copy"
	b.report.add("transfer", "upload of 256 MiB, "+class, "MB/s", up).over(name, bare)
	f := b.report.add("transfer", "download of 256 MiB, "+class, "MB/s", down).over(name, bare)
	if class == "gvisor" {
		f.atLeast(downloadBar)
	}
	return b.server.kill(ctx, x)
}

// rates measures f, which carries the content once, n times.
func rates(n int, f func() error) (samples, error) {
	var all samples
	for range n {
		unix.Sync() // what was written before is not to be paid for now
		began := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		all = append(all, transferSize/1e6/time.Since(began).Seconds())
	}
	return all, nil
}

func (x box) download(ctx context.Context, file string, to io.Writer) error {
	body, err := x.agent.Download(ctx, file)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	n, err := io.Copy(to, body)
	if err == nil && n != transferSize {
		err = fmt.Errorf("%d bytes came instead of %d", n, transferSize)
	}
	return err
}

// compare makes sure that what is measured is also right.
func (x box) compare(ctx context.Context, file string, want []byte) error {
	h := sha256.New()
	if err := x.download(ctx, file, h); err != nil {
		return fmt.Errorf("download: %w", err)
	}
	if sum := sha256.Sum256(want); !bytes.Equal(h.Sum(nil), sum[:]) {
		return fmt.Errorf("what came back is not what was sent")
	}
	return nil
}

func (b *bench) plainCopies(ctx context.Context, content []byte, n int) (samples, error) {
	from, to := filepath.Join(b.server.dir, "plain"), filepath.Join(b.server.dir, "copy")
	defer func() { _, _ = os.Remove(from), os.Remove(to) }()
	if err := os.WriteFile(from, content, 0o600); err != nil {
		return nil, fmt.Errorf("write file: %w", err)
	}
	return rates(n, func() error {
		if out, err := exec.CommandContext(ctx, "dd", "if="+from, "of="+to, "bs=1M").CombinedOutput(); err != nil {
			return fmt.Errorf("dd: %w: %s", err, out)
		}
		return nil
	})
}
