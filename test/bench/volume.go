package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/client"
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

// measureVolume reads and writes files of a volume and, in the same sandbox and in turns, of its root.
func measureVolume(ctx context.Context, b *bench) (err error) {
	v, err := b.server.rest.CreateVolume(ctx, client.VolumeOptions{Name: "bench"})
	if err != nil {
		return err
	}
	x, err := b.server.claim(ctx, client.CreateOptions{
		TemplateID: "bench-gvisor", Timeout: time.Hour, VolumeMounts: []client.VolumeMount{{Name: "bench", Path: "/mnt/bench"}},
	})
	if err != nil {
		return err
	}
	root, volume := map[string]samples{}, map[string]samples{}
	for range b.rounds(10) + 1 {
		for dir, all := range map[string]map[string]samples{"/home/user": root, "/mnt/bench": volume} {
			out, err := x.run(ctx, "python3", "-c", volumeScript, dir)
			if err != nil {
				return err
			}
			var got map[string]float64
			if err := json.Unmarshal([]byte(out.stdout), &got); err != nil {
				return fmt.Errorf("measure %s: %w: %s", dir, err, out.stdout)
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
		bare := root[line.key][1:].at(0.5) // the first round meets cold caches
		f := b.report.add("volume", line.name, line.unit, volume[line.key][1:]).over("in the root", bare)
		if line.key == "write" || line.key == "read" {
			f.atLeast(volumeBar * bare)
		}
	}
	if err := b.clear(ctx, x); err != nil {
		return err
	}
	return b.server.rest.DeleteVolume(ctx, v.VolumeID)
}
