package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// hogSource is a program that takes memory without an end, in the first argument's power of two of processes.
const hogSource = `
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int n, char **args) {
	for (int i = atoi(args[1]); i > 0; i--) fork();
	for (;;) {
		char *p = malloc(1 << 20);
		if (p) memset(p, 1, 1 << 20);
	}
}
`

// endless are programs that take memory, processes or both without an end. Those that fork without an end get no more of them at the
// limit, and may not be killed.
var endless = map[string]struct {
	program string
	bomb    bool
}{
	"Python": {program: `exec python3 -c "
a = []
while True: a.append(b'x' * (1 << 20))"`},
	"Python, forked": {program: `exec python3 -c "
import os
a = [os.fork() for _ in range(3)]
while True: a.append(b'x' * (1 << 20))"`},
	"Python, fork bomb": {bomb: true, program: `exec python3 -c "
import os, time
while True:
    try: os.fork()
    except (OSError, MemoryError): time.sleep(0.001)"`},
	"Python, fork bomb with memory": {bomb: true, program: `exec python3 -c "
import os, time
a = []
while True:
    try:
        os.fork()
        a.append(bytearray(4 << 20))
    except (OSError, MemoryError): time.sleep(0.001)"`},
	"Node": {program: `exec node -e "for (const a = [];;) a.push(Buffer.alloc(1 << 20, 1))"`},
	"Node, forked": {bomb: true, program: `exec node -e "
for (let i = 0; i < 4; i++) require('child_process').spawn(process.execPath, ['-e', 'for (const a = [];;) a.push(Buffer.alloc(1 << 20, 1))'])"`},
	"C":               {program: "exec /tmp/hog 0"},
	"C, forked":       {program: "exec /tmp/hog 3"},
	"Bash, fork bomb": {bomb: true, program: "b() { b | b & }; while :; do b; sleep 0.01; done"},
}

// TestHogs has 100 programs in a row take what a sandbox does not have, some of which other sandboxes have too. What takes memory alone is
// killed, and the sandbox answers after each.
func TestHogs(t *testing.T) {
	skipInFast(t)
	if _, err := os.Stat("/sys/fs/cgroup/memory/memory.oom_control"); err != nil {
		t.Skip("SKIPPED: no sandbox has run with the memory controller of version 2")
	}
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	s.apply(strings.Replace(runtimeTemplate("hogs", "gvisor", "512Mi"), "500m", "2", 1))
	for i := range 2 { // beside each other a kill takes longer
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			s := s.in(t)
			id, _ := s.keep("hogs", "true")
			s.exec(id, "cat > /tmp/hog.c <<'E'\n"+hogSource+"\nE\ngcc -O1 -o /tmp/hog /tmp/hog.c")
			for n := 0; n < 50; {
				for name, hog := range endless {
					n++
					out, err := s.try("exec", id, "--", "timeout", "-s", "KILL", "5", "bash", "-c", hog.program)
					if code := exitCode(err); !hog.bomb && code != 137 && code != 139 {
						t.Errorf("%s: exit code %d, want 137\n%s", name, code, out)
					}
					_, _ = s.try("exec", "--user", "root", id, "--", "bash", "-c", "while kill -9 -1; do :; done") // what is left of it
					eventually.NoError(t, "it answers after "+name, func() error {
						if out, err := s.try("exec", id, "--", "echo", "alive"); err != nil || strings.TrimSpace(out) != "alive" {
							return fmt.Errorf("%q, %w", out, err)
						}
						return nil
					})
				}
			}
		})
	}
}
