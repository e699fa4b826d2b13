package files

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

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

const (
	transferSize = 256 << 20
	// downloadBar is the median, in megabytes a second, that a download shall reach.
	downloadBar = 200
)

// Transfer carries a file to a sandbox and back, beside a plain copy of the same size.
func Transfer(ctx context.Context, b *harness.Bench) error {
	content := make([]byte, transferSize)
	if _, err := rand.Read(content); err != nil {
		return fmt.Errorf("make content: %w", err)
	}
	copied, err := plainCopies(ctx, b, content, b.Rounds(10))
	if err != nil {
		return err
	}
	b.Report.Add("transfer", "plain copy, dd on the same disk", "MB/s", copied)
	for _, class := range b.Server.Classes {
		if err := transferOf(ctx, b, class, content, copied.At(0.5)); err != nil {
			return err
		}
	}
	return nil
}

func transferOf(ctx context.Context, b *harness.Bench, class string, content []byte, bare float64) error {
	x, err := b.Server.Create(ctx, class)
	if err != nil {
		return err
	}
	const file = "/home/user/bench"
	n := b.Rounds(10)
	up, err := rates(n, func() error {
		_, err := x.Agent.Upload(ctx, file, bytes.NewReader(content), nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("upload: %w", err)
	}
	if err := compare(ctx, x, file, content); err != nil {
		return err
	}
	down, err := rates(n, func() error { return download(ctx, x, file, io.Discard) })
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	const name = "plain copy"
	b.Report.Add("transfer", "upload of 256 MiB, "+class, "MB/s", up).Over(name, bare)
	f := b.Report.Add("transfer", "download of 256 MiB, "+class, "MB/s", down).Over(name, bare)
	if class == "gvisor" {
		f.AtLeast(downloadBar)
	}
	return b.Server.Kill(ctx, x)
}

// rates measures f, which carries the content once, n times.
func rates(n int, f func() error) (report.Samples, error) {
	var all report.Samples
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

func download(ctx context.Context, x harness.Sandbox, file string, to io.Writer) error {
	body, err := x.Agent.Download(ctx, file)
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
func compare(ctx context.Context, x harness.Sandbox, file string, want []byte) error {
	h := sha256.New()
	if err := download(ctx, x, file, h); err != nil {
		return fmt.Errorf("download: %w", err)
	}
	if sum := sha256.Sum256(want); !bytes.Equal(h.Sum(nil), sum[:]) {
		return fmt.Errorf("what came back is not what was sent")
	}
	return nil
}

func plainCopies(ctx context.Context, b *harness.Bench, content []byte, n int) (report.Samples, error) {
	from, to := filepath.Join(b.Server.Dir, "plain"), filepath.Join(b.Server.Dir, "copy")
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
