package sshd

import (
	"bufio"
	"io"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// MaxLoginsPerHost is for tests.
const MaxLoginsPerHost = maxLoginsPerHost

func TestPreface(t *testing.T) {
	for text, want := range map[string]struct {
		id, rest string
		fails    bool
	}{
		"SSH-2.0-x\r\n":                       {rest: "SSH-2.0-x\r\n"},
		sandbox.SSHPreface + "abc\r\nSSH-2.0": {id: "abc", rest: "SSH-2.0"},
		sandbox.SSHPreface + "abc\nSSH-2.0":   {id: "abc", rest: "SSH-2.0"},
		"BARCHAN-SANDWICH abc\n":              {rest: "BARCHAN-SANDWICH abc\n"},
		"BARCHAN":                             {fails: true},
		"":                                    {fails: true},
		sandbox.SSHPreface + strings.Repeat("x", maxPreface) + "\n": {fails: true},
	} {
		br := bufio.NewReader(strings.NewReader(text))
		id, err := takePreface(br)
		if id != want.id || (err != nil) != want.fails {
			t.Errorf("%q: %q, %v", text, id, err)
		}
		if rest, _ := io.ReadAll(br); !want.fails && string(rest) != want.rest {
			t.Errorf("%q: the rest is %q", text, rest)
		}
	}
}

func FuzzPreface(f *testing.F) {
	f.Add(sandbox.SSHPreface + "abc\r\nSSH-2.0")
	f.Fuzz(func(t *testing.T, text string) {
		br := bufio.NewReader(strings.NewReader(text))
		id, err := takePreface(br)
		rest, _ := io.ReadAll(br)
		switch {
		case len(id) > maxPreface || strings.Contains(id, "\n"):
			t.Errorf("%q: %q", text, id)
		case err == nil && id == "" && string(rest) != text && !strings.HasPrefix(text, sandbox.SSHPreface):
			t.Errorf("%q: %q is left", text, rest)
		}
	})
}

func TestIsSandbox(t *testing.T) {
	const id = sandbox.ID("i0123456789abcdefghi")
	for host, want := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "127.9.9.9": true, "::1": true, "[::1]": true, "0.0.0.0": true, "::ffff:127.0.0.1": true, string(id): true,
		string(id) + ".barchan": true, "": false, "10.0.0.1": false, "169.254.169.254": false, "example.org": false, "localhost.example.org": false, string(id) + "x": false,
	} {
		if got := isSandbox(host, id); got != want {
			t.Errorf("%q: %t", host, got)
		}
	}
}

// TestVariables bounds the environment of a session.
func TestVariables(t *testing.T) {
	pair := func(name, value string) []byte { return ssh.Marshal(struct{ Name, Value string }{name, value}) }
	s := &session{env: map[string]string{}}
	for i := range 2 * maxEnv {
		if got := s.setVariable(pair("V"+strconv.Itoa(i), "x")); got != (i < maxEnv) {
			t.Fatalf("variable %d: %t", i, got)
		}
	}
	s = &session{env: map[string]string{}}
	if s.setVariable(pair("A=B", "x")) || s.setVariable(pair("", "x")) || s.setVariable([]byte("x")) || s.setVariable(pair("A", strings.Repeat("x", maxEnvSize))) {
		t.Errorf("accepted: %v", s.env)
	}
}
