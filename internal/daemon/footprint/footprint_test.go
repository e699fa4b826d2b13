package footprint

import (
	"os"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/prometheus/procfs"
)

const mib = 1 << 20

func TestReleaseIsDueAtRest(t *testing.T) {
	m := &monitor{}
	allocated := uint64(100 * mib)
	look := func(what string, allocates, resident uint64, want bool) {
		t.Helper()
		allocated += allocates
		if got := m.due(heap{allocated, resident}); got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	look("the first look knows no rest", 0, 80*mib, false)
	look("it starts", 30*mib, 90*mib, false)
	look("it rests after the start", mib, 90*mib, true)
	m.floor = 40 * mib
	look("just released", 0, 41*mib, false)
	look("it works", 40*mib, 80*mib, false)
	look("it works a little less", 3*mib, 83*mib, false)
	look("it rests", 2*mib, 85*mib, true)
	m.floor = 80 * mib // most of it lives
	look("a few MiB are not worth it", mib, 88*mib, false)
	look("nor is an eighth of the heap", mib, 90*mib, false)
	look("more is", mib, 91*mib, true)
	m.floor = 400 * mib
	look("a large heap has more slack", mib, 440*mib, false)
	look("much of it was deleted and returned", mib, 60*mib, false)
	look("the floor sank with it", mib, 70*mib, true)
}

// Releasing takes pages of the program away, and nothing that it needs: it goes on, with its variables as they were.
func TestUnmapProgram(t *testing.T) {
	variable = "set by the test"
	before := fileBytes(t)
	if err := unmapProgram(); err != nil {
		t.Fatal(err)
	}
	if after := fileBytes(t); after >= before {
		t.Errorf("%d bytes of files are mapped, before %d", after, before)
	}
	runtime.GC()
	if variable != "set by the test" || strings.ToUpper(constant) != "FROM THE FILE" {
		t.Errorf("variable %q, constant %q", variable, constant)
	}
}

// The tables of the program are read here and there, so that a huge page of them is mapped for a few bytes. The code keeps its own.
func TestUnmapProgramLeavesHugePagesToCode(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage"); err != nil {
		t.Skip("the kernel has no huge pages")
	}
	if err := unmapProgram(); err != nil {
		t.Fatal(err)
	}
	p, err := procfs.NewProc(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	program, err := p.Executable()
	if err != nil {
		t.Fatal(err)
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	small := regexp.MustCompile(`(?m)^[0-9a-f-]+ (r--|r-x)p .* ` + regexp.QuoteMeta(program) + `\n(?:.*\n)*?VmFlags:.*$`)
	mappings := small.FindAllStringSubmatch(string(smaps), -1)
	if len(mappings) < 2 {
		t.Fatalf("%d mappings of %s", len(mappings), program)
	}
	for _, m := range mappings {
		if has := strings.Contains(m[0]+" ", " nh "); has == strings.Contains(m[1], "x") {
			t.Errorf("without huge pages: %v\n%s", has, m[0])
		}
	}
}

var variable = "of the file"

const constant = "from the file"

func fileBytes(t *testing.T) uint64 {
	t.Helper()
	p, err := procfs.NewProc(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	s, err := p.NewStatus()
	if err != nil {
		t.Fatal(err)
	}
	return s.RssFile
}
