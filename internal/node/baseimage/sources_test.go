package baseimage

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestHostSources(t *testing.T) {
	const debian = "ID=debian\nVERSION_CODENAME=\"bookworm\"\n"
	tests := map[string]struct {
		files map[string]string
		suite string
		want  []string
	}{
		"stanzas": {
			files: map[string]string{
				"etc/os-release": debian,
				"etc/apt/sources.list.d/debian.sources": "# a note\nTypes: deb deb-src\nURIs: http://near.test/debian\n" +
					"Suites: bookworm-updates bookworm\nComponents: main contrib\nSigned-By: /k.gpg\n\n" +
					"Types: deb\nURIs: http://near.test/security\nSuites: bookworm-security\nComponents: main\n",
				"etc/apt/sources.list.d/other.sources": "Types: deb\nURIs: http://node.test\nSuites: nodistro\nComponents: main\n",
			},
			want: []string{
				"deb [signed-by=/k.gpg] http://near.test/debian bookworm main contrib",
				"deb [signed-by=/k.gpg] http://near.test/debian bookworm-updates main contrib",
				"deb http://near.test/security bookworm-security main",
			},
		},
		"one line each, another suite": {
			files: map[string]string{
				"etc/os-release": debian,
				"etc/apt/sources.list": "deb-src http://x.test/ bookworm main\ndeb  [arch=amd64]  http://x.test/debian bookworm main # home\n" +
					"deb https://cloud.test/apt sdk-bookworm main\n",
			},
			suite: "trixie",
			want:  []string{"deb [arch=amd64] http://x.test/debian trixie main"},
		},
		"disabled":     {files: map[string]string{"etc/os-release": debian, "etc/apt/sources.list.d/a.sources": "Enabled: no\nTypes: deb\nURIs: http://x.test\nSuites: bookworm\nComponents: main\n"}},
		"inline key":   {files: map[string]string{"etc/os-release": debian, "etc/apt/sources.list.d/a.sources": "Types: deb\nURIs: http://x.test\nSuites: bookworm\nComponents: main\nSigned-By:\n -----BEGIN\n abc\n"}},
		"only updates": {files: map[string]string{"etc/os-release": debian, "etc/apt/sources.list": "deb http://x.test bookworm-updates main\n"}},
		"not debian":   {files: map[string]string{"etc/os-release": "ID=other\nVERSION_CODENAME=bookworm\n", "etc/apt/sources.list": "deb http://x.test bookworm main\n"}},
		"nothing":      {},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for path, data := range tt.files {
				path = filepath.Join(root, path)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			suite := tt.suite
			if suite == "" {
				suite = "bookworm"
			}
			got, err := hostSources(t.Context(), root, suite)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("hostSources =\n%q\nwant\n%q", got, tt.want)
			}
		})
	}
}

func FuzzListSources(f *testing.F) {
	f.Add([]byte("deb [a=b] http://x/ y z\n"))
	f.Add([]byte("deb [ http://x/ y z\n"))
	f.Add([]byte("Types: deb\nURIs: http://x/ y\nSuites: a b\nComponents: c\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, line := range append(listSources(data), stanzaSources(data)...) {
			if !isSource(line) {
				t.Errorf("result %q is not a source", line)
			}
			retarget([]string{line}, "a", "b")
		}
	})
}

func TestListenerStages(t *testing.T) {
	var steps []Progress
	l := &outputParser{report: &reporter{fn: func(p Progress) { steps = append(steps, p) }}}
	for _, part := range []string{"I: running apt-get upd", "ate...\nGet:1 x\rdone\nI: extracting archives...\n", "E: broken\n"} {
		if n, err := l.Write([]byte(part)); n != len(part) || err != nil {
			t.Fatalf("Write = %d, %v", n, err)
		}
	}
	want := []Progress{{Step: "read package lists", Percent: 2}, {Step: "extract packages", Percent: 18}}
	if !slices.Equal(steps, want) {
		t.Errorf("steps = %v, want %v", steps, want)
	}
	if !slices.Equal(l.tail, []string{"Get:1 x", "E: broken"}) { // +checklocksignore
		t.Errorf("tail = %q", l.tail) // +checklocksignore
	}
}
