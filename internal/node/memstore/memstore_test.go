package memstore_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/memstore"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

const marker = "a password in the memory of a sandbox"

// host is a machine whose data directory is dir, which needs an image to encrypt.
type host struct {
	t   *testing.T
	dir string
	key string
}

func newHost(t *testing.T) *host {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for mounts")
	}
	if _, err := disk.Check(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	// A file system without encryption, of a size that makes the search for a marker short.
	h := &host{t: t, dir: filepath.Join(t.TempDir(), "node")}
	below := disk.Open(filepath.Join(filepath.Dir(h.dir), "templates"))
	must(t, below.Mount(t.Context(), h.device(), h.dir, 128<<20))
	h.key = filepath.Join(filepath.Dir(h.dir), "memory.key")
	t.Cleanup(func() {
		h.reboot()
		if err := disk.Discard(h.dir); err != nil {
			t.Error(err)
		}
	})
	return h
}

func (h *host) device() string { return filepath.Join(filepath.Dir(h.dir), "device.img") }

func (h *host) store(encrypt bool) *memstore.Store {
	must(h.t, os.MkdirAll(filepath.Join(h.dir, "memory"), 0o700))
	must(h.t, os.MkdirAll(filepath.Join(h.dir, "checkpoints", "c", "x"), 0o700))
	return memstore.New(memstore.Config{
		Dir: h.dir, Plain: filepath.Join(h.dir, "memory"), Encrypt: encrypt, KeyFile: h.key, Disks: disk.Open(filepath.Join(h.dir, "disks")),
	})
}

func (h *host) open(encrypt bool) *memstore.Store {
	h.t.Helper()
	s := h.store(encrypt)
	if err := s.Open(h.t.Context()); errors.Is(err, errs.ErrUnavailable) && strings.Contains(err.Error(), "CONFIG_FS_ENCRYPTION") {
		h.t.Skipf("SKIPPED: %v", err)
	} else {
		must(h.t, err)
	}
	return s
}

// reboot unmounts what a restart of the machine unmounts, and so removes the keys from the kernel.
func (h *host) reboot() {
	h.t.Helper()
	must(h.t, disk.Unmount(filepath.Join(h.dir, "encrypted")))
}

// write writes an image with the marker.
func (h *host) write(dir string) {
	h.t.Helper()
	part, err := memimage.Begin(dir)
	must(h.t, err)
	must(h.t, os.WriteFile(filepath.Join(part, "pages.img"), bytes.Repeat([]byte(marker+"\n"), 10_000), 0o600))
	must(h.t, memimage.Seal(h.t.Context(), &memimage.Image{Build: memimage.Build{SHA256: "abc"}}, part, dir, true))
}

// reads fails unless an image is whole.
func (h *host) reads(dir string) {
	h.t.Helper()
	must(h.t, memimage.Verify(h.t.Context(), dir))
	text, err := os.ReadFile(filepath.Join(dir, "pages.img"))
	if err != nil || !strings.HasPrefix(string(text), marker) {
		h.t.Errorf("%s: %.40q, %v", dir, text, err)
	}
}

// onDisk reports whether the marker is anywhere on the machine's disk.
func (h *host) onDisk() bool {
	h.t.Helper()
	unix.Sync()
	f, err := os.Open(h.device())
	must(h.t, err)
	defer func() { _ = f.Close() }()
	const size = 1 << 20
	buf := make([]byte, size+len(marker))
	for at := int64(0); ; at += size {
		n, err := f.ReadAt(buf, at)
		if bytes.Contains(buf[:n], []byte(marker)) {
			return true
		}
		if errors.Is(err, io.EOF) {
			return false
		}
		must(h.t, err)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestDiskShowsNothing(t *testing.T) {
	h := newHost(t)
	s := h.open(true)
	h.write(s.Sandbox("s"))
	h.write(s.Checkpoint("c"))
	if h.onDisk() {
		t.Error("encrypted memory is in the clear on the disk")
	}
	h.reboot()
	s = h.open(true)
	h.reads(s.Sandbox("s"))
	h.reads(s.Checkpoint("c"))
	must(t, memimage.Link(t.Context(), s.Sandbox("s"), s.Checkpoint("linked")))
	h.reads(s.Checkpoint("linked"))
	if state, detail := s.Describe(); state != "encrypted" || detail != "AES-256-XTS" {
		t.Errorf("%s, %s", state, detail)
	}
}

// Images in the clear are read after the setting is on, and encrypted ones after it is off.
func TestSettingChanges(t *testing.T) {
	h := newHost(t)
	s := h.open(false)
	h.write(s.Sandbox("clear"))
	h.write(s.Checkpoint("c"))
	if !h.onDisk() {
		t.Error("the marker is not found in the clear either")
	}
	s = h.open(true)
	h.reads(s.Sandbox("clear"))
	h.reads(s.Checkpoint("c"))
	if _, detail := s.Describe(); !strings.Contains(detail, "2 earlier images are in the clear") {
		t.Errorf("%s", detail)
	}
	if err := memimage.Link(t.Context(), s.Sandbox("clear"), s.Checkpoint("linked")); !errors.Is(err, unix.EXDEV) {
		t.Errorf("a link from the clear: %v", err)
	}
	h.write(s.Sandbox("s"))
	encrypted := s.Sandbox("s")
	s = h.open(false)
	if s.Sandbox("s") != encrypted || filepath.Dir(s.Sandbox("new")) != filepath.Join(h.dir, "memory") {
		t.Errorf("%s, %s", s.Sandbox("s"), s.Sandbox("new"))
	}
	h.reads(s.Sandbox("s"))
	must(t, memimage.Remove(encrypted))
	must(t, memimage.Remove(s.Sandbox("clear")))
	h.write(s.Sandbox("s"))
	if s.Sandbox("s") != filepath.Join(h.dir, "memory", "s") {
		t.Error(s.Sandbox("s"))
	}
}

// A new key in front of the file is for new memory; the old one is needed until its memory is gone.
func TestRotation(t *testing.T) {
	h := newHost(t)
	s := h.open(true)
	h.write(s.Sandbox("old"))
	first, err := os.ReadFile(h.key)
	must(t, err)
	second := bytes.Repeat([]byte{7}, 32)
	must(t, os.WriteFile(h.key, slices.Concat(second, first), 0o600))
	h.reboot()
	s = h.open(true)
	h.reads(s.Sandbox("old"))
	h.write(s.Sandbox("new"))
	if filepath.Dir(s.Sandbox("old")) == filepath.Dir(s.Sandbox("new")) || filepath.Dir(s.Sandbox("other")) != filepath.Dir(s.Sandbox("new")) {
		t.Errorf("old %s, new %s", s.Sandbox("old"), s.Sandbox("new"))
	}
	must(t, os.WriteFile(h.key, second, 0o600))
	if err := h.store(true).Open(t.Context()); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("without the old key: %v", err)
	}
	must(t, memimage.Remove(s.Sandbox("old")))
	h.reboot()
	h.reads(h.open(true).Sandbox("new"))
}

func TestKeyIsWrong(t *testing.T) {
	h := newHost(t)
	h.write(h.open(true).Sandbox("s"))
	right, err := os.ReadFile(h.key)
	must(t, err)
	for _, tt := range []struct {
		name  string
		key   []byte
		wants string
	}{
		{"missing", nil, "there is no such file"},
		{"another", bytes.Repeat([]byte{1}, 32), "it lacks key"},
		{"cut", right[:31], "it has 31 bytes, want 32"},
		{"empty", []byte{}, "it has 0 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, encrypt := range []bool{true, false} {
				h.reboot()
				must(t, os.Remove(h.key))
				if tt.key != nil {
					must(t, os.WriteFile(h.key, tt.key, 0o600))
				}
				err := h.store(encrypt).Open(t.Context())
				if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), tt.wants) || !strings.Contains(err.Error(), h.key) {
					t.Errorf("encrypt %v: %v", encrypt, err)
				}
				must(t, os.WriteFile(h.key, right, 0o600))
				h.reads(h.open(encrypt).Sandbox("s"))
			}
		})
	}
}

// A crash between the steps of Open leaves what the next one finishes.
func TestOpenAfterCrash(t *testing.T) {
	for _, tt := range []struct {
		name  string
		leave func(h *host)
	}{
		{"image half made", func(h *host) {
			must(h.t, os.WriteFile(filepath.Join(h.dir, "encrypted.img.making"), []byte("x"), 0o600))
		}},
		{"key alone", func(h *host) { must(h.t, os.WriteFile(h.key, bytes.Repeat([]byte{3}, 32), 0o600)) }},
		{"directory without policy", func(h *host) {
			s := h.open(true)
			at := filepath.Dir(s.Sandbox("x"))
			must(h.t, os.Remove(at))
			must(h.t, os.Mkdir(at, 0o700))
		}},
		{"one directory of two", func(h *host) { must(h.t, os.Remove(filepath.Dir(h.open(true).Checkpoint("x")))) }},
		{"a check of writes", func(h *host) {
			must(h.t, os.WriteFile(filepath.Join(filepath.Dir(h.open(true).Sandbox("x")), ".write-check"), nil, 0o600))
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHost(t)
			tt.leave(h)
			h.reboot()
			s := h.open(true)
			h.write(s.Sandbox("s"))
			h.write(s.Checkpoint("c2"))
			if h.onDisk() {
				t.Error("memory is in the clear")
			}
		})
	}
}

// Content in the clear where encrypted memory belongs is an error: it is never taken for encrypted.
func TestClearContentIsRefused(t *testing.T) {
	h := newHost(t)
	at := filepath.Dir(h.open(true).Sandbox("x"))
	must(t, os.Remove(at))
	must(t, os.MkdirAll(filepath.Join(at, "y"), 0o700))
	if err := h.store(true).Open(t.Context()); !errors.Is(err, unix.ENOTEMPTY) {
		t.Errorf("content in the clear: %v", err)
	}
}

// All is removed without the key.
func TestDiscard(t *testing.T) {
	h := newHost(t)
	h.write(h.open(true).Sandbox("s"))
	h.reboot()
	must(t, os.Remove(h.key))
	if err := h.store(false).Open(t.Context()); !errors.Is(err, errs.ErrInvalid) { // it has mounted the image
		t.Errorf("without a key: %v", err)
	}
	for range 2 {
		must(t, memstore.Discard(h.dir))
	}
	if left, err := filepath.Glob(filepath.Join(h.dir, "encrypted*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	must(t, h.store(false).Open(t.Context()))
}
