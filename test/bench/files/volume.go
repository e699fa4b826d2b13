package files

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// volumeBar is the least share of the root's speed, at the median.
const volumeBar = 0.5

// volumeScript measures one directory: a large file, synced once, and small ones.
const volumeScript = `
import json, os, sys, time
d = sys.argv[1]
block, blocks, files = os.urandom(1 << 20), 128, 200
def rate(n, f):
    began = time.monotonic()
    f()
    return n / (time.monotonic() - began)
def write():
    with open(d + "/large", "wb") as f:
        for _ in range(blocks):
            f.write(block)
        f.flush()
        os.fsync(f.fileno())
def read():
    with open(d + "/large", "rb", buffering=0) as f:
        while f.read(1 << 20):
            pass
def make():
    for i in range(files):
        with open(f"{d}/{i}", "wb") as f:
            f.write(block[:4096])
def look():
    for i in range(files):
        os.stat(f"{d}/{i}")
        with open(f"{d}/{i}", "rb") as f:
            f.read()
def drop():
    for i in range(files):
        os.unlink(f"{d}/{i}")
size = blocks * (1 << 20) / 1e6
print(json.dumps({"write": rate(size, write), "read": rate(size, read), "make": rate(files, make), "look": rate(files, look), "drop": rate(files, drop)}))
`

// Volume reads and writes files of a volume and, in the same sandbox and in turns, of its root.
func Volume(ctx context.Context, b *harness.Bench) (err error) {
	v, err := b.Server.REST.CreateVolume(ctx, client.VolumeOptions{Name: "bench"})
	if err != nil {
		return err
	}
	x, err := b.Server.Claim(ctx, client.CreateOptions{
		TemplateID: harness.DefaultTemplate, Timeout: time.Hour, VolumeMounts: []client.VolumeMount{{Name: "bench", Path: "/mnt/bench"}},
	})
	if err != nil {
		return err
	}
	root, volume := map[string]report.Samples{}, map[string]report.Samples{}
	for range b.Rounds(10) + 1 {
		for dir, all := range map[string]map[string]report.Samples{"/home/user": root, "/mnt/bench": volume} {
			out, err := x.Run(ctx, "python3", "-c", volumeScript, dir)
			if err != nil {
				return err
			}
			var got map[string]float64
			if err := json.Unmarshal([]byte(out.Text), &got); err != nil {
				return fmt.Errorf("measure %s: %w: %s", dir, err, out.Text)
			}
			for what, n := range got {
				all[what] = append(all[what], n)
			}
		}
	}
	for _, line := range []struct{ key, name, unit string }{
		{"write", "write 128 MiB and sync", "MB/s"},
		{"read", "read 128 MiB", "MB/s"},
		{"make", "create files of 4 KiB", "/s"},
		{"look", "stat and read files of 4 KiB", "/s"},
		{"drop", "remove files", "/s"},
	} {
		bare := root[line.key][1:].At(0.5) // the first round meets cold caches
		f := b.Report.Add("volume", line.name, line.unit, volume[line.key][1:]).Over("in the root", bare)
		if line.key == "write" || line.key == "read" {
			f.AtLeast(volumeBar * bare)
		}
	}
	if err := b.Server.Clear(ctx, x); err != nil {
		return err
	}
	return b.Server.REST.DeleteVolume(ctx, v.VolumeID)
}
