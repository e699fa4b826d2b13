package dockerfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/client/template"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// open makes a context of files by their names; a name that ends with / is a directory, a content that begins with -> a link.
func open(t *testing.T, files map[string]string) *os.Root {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if link, ok := strings.CutPrefix(content, "->"); ok {
			err = os.Symlink(link, file)
		} else if strings.HasSuffix(name, "/") {
			err = os.MkdirAll(file, 0o755)
		} else {
			err = os.WriteFile(file, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = root.Close() })
	return root
}

// lines returns steps as text: the type, then the arguments, quoted.
func (p *Plan) lines() []string {
	var out []string
	for _, s := range p.Steps {
		out = append(out, s.Type+" "+quote(s.Args...))
	}
	return out
}

var inTheContext = map[string]string{
	"real.tar": strings.Repeat("\x00", 257) + "ustar" + strings.Repeat("\x00", 250),
	"app.py":   "app", "b.py": "b", "src/main.go": "main", "src/lib/x.go": "x", "a b": "space",
	"link": "->src/main.go", "out": "->../../etc/passwd", "packed.tar.gz": "\x1f\x8b\x08", "abs": "->/etc/passwd",
}

func TestParse(t *testing.T) {
	const begin, end = "USER root|WORKDIR /|", "|USER user|WORKDIR /home/user"
	tests := map[string]struct {
		file, args, target string
		from, want         string // want: steps, separated by |
		start, ready       string
		notes              []string
	}{
		"image alone":       {file: "FROM debian:12\n", want: "USER root|WORKDIR /" + end},
		"run":               {file: "FROM x\nRUN apt-get update && \\\n  apt-get install -y curl\n", want: begin + "RUN " + quote("/bin/sh -c 'apt-get update &&   apt-get install -y curl'") + end},
		"run in exec form":  {file: "FROM x\nRUN [\"echo\", \"it's $HOME\"]\n", want: begin + "RUN " + quote(`echo 'it'\''s $HOME'`) + end},
		"run of a script":   {file: "FROM x\nRUN <<EOF\nset -e\necho $A\nEOF\n", want: begin + "RUN " + quote("/bin/sh -c 'set -e\necho $A\n'") + end},
		"run of an inline":  {file: "FROM x\nRUN cat <<A <<B\n1\nA\n2\nB\n", want: begin + "RUN " + quote("/bin/sh -c 'cat <<A <<B\n1\nA\n2\nB'") + end},
		"shell":             {file: "FROM x\nSHELL [\"/bin/bash\", \"-ec\"]\nRUN a | b\n", want: begin + "RUN " + quote("/bin/bash -ec 'a | b'") + end},
		"own user and dir":  {file: "FROM x\nUSER app\nWORKDIR /srv\nWORKDIR sub\n", want: begin + "USER app|WORKDIR /srv|WORKDIR /srv/sub"},
		"group":             {file: "FROM x\nUSER app:staff\nWORKDIR /srv\n", want: begin + "USER app:staff|WORKDIR /srv"},
		"numbers":           {file: "FROM x\nUSER 1234:\nWORKDIR /srv\n", want: begin + "USER 1234|WORKDIR /srv"},
		"env":               {file: "FROM x\nENV A=1 B=\"two words\"\nENV C=$A-${B}-${D:-d} A=2\nENV old form\n", want: begin + "ENV A 1 B 'two words'|ENV C '1-two words-d' A 2|ENV old form" + end},
		"unset":             {file: "FROM x\nENV A=[$NO]\n", want: begin + "ENV A '[]'" + end, notes: []string{"Dockerfile:2: $NO is taken as empty: no ENV or ARG sets it, and variables of the image are not known here"}},
		"path":              {file: "FROM x\nENV PATH=/venv/bin:$PATH\nRUN pip\nCMD [\"app\"]\n", want: begin + "ENV PATH /venv/bin:" + defaultPath + "|RUN " + quote("export PATH=/venv/bin:"+defaultPath+"; /bin/sh -c pip") + end, start: "export PATH=/venv/bin:" + defaultPath + "; app", notes: []string{"Dockerfile:2: $PATH is taken as " + defaultPath + ": that of the image is not known here"}},
		"arg":               {file: "ARG V=1\nARG U=u\nFROM x:$V\nARG V\nARG W=w$V\nENV E=$U$V$W\nRUN env\n", args: "W=given", from: "x:1", want: begin + "ENV E 1given|RUN " + quote("export V=1 W=given; /bin/sh -c env") + end, notes: []string{"Dockerfile:6: $U is taken as empty: no ENV or ARG sets it, and variables of the image are not known here"}},
		"arg hidden by env": {file: "FROM x\nARG A=1\nENV A=2\nRUN env\n", want: begin + "ENV A 2|RUN " + quote("/bin/sh -c env") + end},
		"arg without use":   {file: "FROM x\n", args: "A=1", want: "USER root|WORKDIR /" + end, notes: []string{"Dockerfile: has no ARG A, which --build-arg sets"}},
		"arg of the proxy":  {file: "FROM x\nRUN a\n", args: "HTTP_PROXY=http://p", want: begin + "RUN " + quote("export HTTP_PROXY=http://p; /bin/sh -c a") + end},
		"arg of a platform": {file: "FROM --platform=$BUILDPLATFORM x\nARG TARGETARCH\n", want: "USER root|WORKDIR /" + end, notes: []string{"Dockerfile:1: FROM --platform has no effect: sandboxes have the platform of their server", "Dockerfile:2: ARG TARGETARCH has no value: the platform of the server is not known here; set it by --build-arg"}},
		"copy of a file":    {file: "FROM x\nWORKDIR /srv\nCOPY app.py .\nCOPY ./src/main.go x.go\nCOPY [\"a b\", \"/y/\"]\n", want: begin + "WORKDIR /srv|COPY app.py /srv/ root:root ''|COPY src/main.go /srv/x.go root:root ''|COPY 'a b' /y/ root:root ''|USER user"},
		"copy as another":   {file: "FROM x\nCOPY --chown=app --chmod=755 app.py /a\nCOPY --chown=7 app.py /a\nCOPY --chown=a:b --link app.py /a\n", want: begin + "COPY app.py /a app: 0755|COPY app.py /a 7:7 ''|COPY app.py /a a:b ''" + end},
		"copy of several":   {file: "FROM x\nCOPY *.py none* src /a/\nADD app.py src/ /a/\nCOPY app* /a\n", want: begin + "COPY . /a/ root:root ''|COPY . /a/ root:root ''|COPY app.py /a root:root ''" + end},
		"copy of none":      {file: "FROM x\nCOPY no* /a\n", want: "USER root|WORKDIR /" + end, notes: []string{"Dockerfile:2: COPY has no effect: no file matches no*"}},
		"copy of all":       {file: "FROM x\nCOPY --chmod=0644 src /s\nCOPY src/. /s\n", want: begin + "COPY src /s root:root 0644|COPY src /s root:root ''" + end},
		"copy of a text":    {file: "FROM x\nENV A=1\nCOPY <<E /etc/conf\na=$A\nE\n", want: begin + "ENV A 1|COPY E /etc/conf root:root ''" + end},
		"commands":          {file: "FROM x\nENTRYPOINT [\"a\", \"b c\"]\nCMD [\"d\"]\nHEALTHCHECK CMD curl -f localhost || exit 1\n", want: "USER root|WORKDIR /" + end, start: "a 'b c' d", ready: "/bin/sh -c 'curl -f localhost || exit 1'"},
		"entrypoint shell":  {file: "FROM x\nCMD [\"d\"]\nENTRYPOINT a b\n", want: "USER root|WORKDIR /" + end, start: "/bin/sh -c 'a b'"},
		"no healthcheck":    {file: "FROM x\nHEALTHCHECK CMD [\"a\"]\nHEALTHCHECK NONE\nCMD x\n", want: "USER root|WORKDIR /" + end, start: "/bin/sh -c x"},
		"stages":            {file: "FROM x AS a\nENV A=1\nCMD one\nFROM a AS b\nENV B=$A\nENTRYPOINT [\"e\"]\n", want: begin + "ENV A 1|ENV B 1" + end, start: "e"},
		"target":            {file: "FROM x AS a\nENV A=1\nFROM a\nENV B=2\n", target: "A", want: begin + "ENV A 1" + end, notes: []string{"Dockerfile:3: this stage is left out: stage a needs nothing of it"}},
		"target by number":  {file: "FROM x\nENV A=1\nFROM y\nVOLUME /v\n", target: "0", want: begin + "ENV A 1" + end, notes: []string{"Dockerfile:3: this stage is left out: stage 0 needs nothing of it"}},
		"healthcheck with times": {
			file: "FROM x\nHEALTHCHECK --interval=5s --timeout=1500ms CMD [\"a\"]\n", want: "USER root|WORKDIR /" + end, ready: "if command -v timeout >/dev/null; then exec timeout -s KILL 2 a; fi; a",
			notes: []string{"Dockerfile:2: HEALTHCHECK: only --timeout has an effect: a build repeats the command every second at most, for 10 minutes"},
		},
		"copy with exclude": {file: "FROM x\nCOPY --exclude=lib --exclude=*.md src /s/\n", want: begin + "COPY src /s/ root:root ''" + end},
		"copy with parents": {file: "FROM x\nCOPY --parents src/./lib app.py /s/\n", want: begin + "COPY . /s/ root:root ''" + end},
		"arg of one stage":  {file: "FROM x AS a\nARG A=1\nFROM a\nRUN env\n", want: begin + "RUN " + quote("/bin/sh -c env") + end},
		"volume":            {file: "FROM x\nVOLUME /v\n", want: "USER root|WORKDIR /" + end, notes: []string{"Dockerfile:2: VOLUME has no effect: its files are a sandbox's like all others"}},
		"add of a file":     {file: "FROM x\nADD packed.tar.gz app.py /d/\nADD --unpack=false real.tar /d/\n", want: begin + "COPY . /d/ root:root ''|COPY real.tar /d/ root:root ''" + end},
		"add of an archive": {file: "FROM x\nWORKDIR /w\nADD real.tar app.py d/\n", want: begin + "WORKDIR /w|COPY app.py /w/d/ root:root ''|RUN " + quote("mkdir -p /w/d && tar -xf /run/barchan/0/real.tar -C /w/d", "root") + "|USER user"},
		"no effect": {file: "FROM x\nLABEL a=b\nEXPOSE 80\nMAINTAINER me\nSTOPSIGNAL 9\n", want: "USER root|WORKDIR /" + end, notes: []string{
			"Dockerfile:2: LABEL has no effect", "Dockerfile:3: EXPOSE has no effect", "Dockerfile:4: MAINTAINER has no effect", "Dockerfile:5: STOPSIGNAL has no effect",
		}},
		"escape": {file: "# escape=`\nFROM x\nRUN a `\n b\n", want: begin + "RUN " + quote("/bin/sh -c 'a  b'") + end},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			opt := Options{Name: "Dockerfile", Target: tt.target, Context: open(t, inTheContext), BuildArgs: map[string]string{}}
			if k, v, ok := strings.Cut(tt.args, "="); ok {
				opt.BuildArgs[k] = v
			}
			p, err := Parse([]byte(tt.file), opt)
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(p.lines(), "|"); got != strings.TrimPrefix(tt.want, "|") {
				t.Errorf("steps\n%s\nwant\n%s", got, tt.want)
			}
			if tt.from != "" && p.From.Image != tt.from {
				t.Errorf("from %+v, want %s", p.From, tt.from)
			}
			if p.StartCommand != tt.start || p.ReadyCommand != tt.ready {
				t.Errorf("start %q, ready %q; want %q, %q", p.StartCommand, p.ReadyCommand, tt.start, tt.ready)
			}
			if !slices.Equal(p.Notes, tt.notes) {
				t.Errorf("notes %q, want %q", p.Notes, tt.notes)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	tests := map[string]struct{ file, want string }{
		"empty":           {"", "Dockerfile: file with no instructions"},
		"no from":         {"ARG A\n", "Dockerfile: has no FROM"},
		"before from":     {"RUN a\nFROM x\n", "Dockerfile:1: RUN is before the first FROM"},
		"unknown":         {"FROM x\n\nFOO\n", "Dockerfile:3: unknown instruction: FOO (did you mean FROM?)"},
		"scratch":         {"FROM scratch\n", "Dockerfile:1: FROM scratch: commands and copies need a shell; start from an image that has one"},
		"empty image":     {"ARG I\nFROM $I\n", "Dockerfile:2: FROM $I: the name is empty; give its arguments a value by --build-arg"},
		"several":         {"FROM x\nONBUILD RUN a\nRUN --security=insecure a\nRUN --network=host a\nADD https://e.example/x /\n", "Dockerfile:2: ONBUILD is for images that others are built from, which a template is not; put the instruction into that Dockerfile\nDockerfile:3: RUN --security=insecure: no command leaves its sandbox\nDockerfile:4: RUN: --network=host: a sandbox has a network of its own; leave it out, or use none\nDockerfile:5: ADD of a URL needs --checksum=sha256:HEX, for its kept result would hide a change; or use RUN curl -o"},
		"git":             {"FROM x\nADD git@h:a/b.git /\n", "Dockerfile:2: ADD of a git repository is not supported; use RUN git clone"},
		"archive":         {"FROM x\nADD --chown=a real.tar /\n", "Dockerfile:2: ADD of an archive with --chown, --chmod or --exclude is not supported yet; add a RUN that changes the files"},
		"later stage":     {"FROM x AS a\nCOPY --from=b /c /\nFROM y AS b\nFROM a\n", "Dockerfile:2: COPY --from=b: stage b is not before this one"},
		"itself":          {"FROM x AS a\nCOPY --from=0 /c /\n", "Dockerfile:2: COPY --from=0: stage a is not before this one"},
		"no stage":        {"FROM x\nCOPY --from=3 /c /\n", "Dockerfile:2: COPY --from=3: there is no such stage"},
		"from scratch":    {"FROM x\nCOPY --from=scratch /c /\n", "Dockerfile:2: COPY --from=scratch: it has no files"},
		"fault of a base": {"FROM x AS a\nCOPY none /c\nFROM a AS b\nFROM a\nCOPY --from=b /x /x\n", `Dockerfile:2: COPY: the context has no "none"`},
		"mount's type":    {"FROM x\nRUN --mount=type=ssh a\n", "Dockerfile:2: RUN: --mount=type=ssh: it is not supported yet; use type=secret"},
		"mount's target":  {"FROM x\nRUN --mount=type=cache a\n", "Dockerfile:2: RUN: --mount=type=cache: it needs a target below the root"},
		"mount's key":     {"FROM x\nRUN --mount=type=cache,targt=/c a\n", "Dockerfile:2: RUN: unexpected key 'targt' in 'targt=/c' (did you mean target?)"},
		"mounted file":    {"FROM x\nRUN --mount=type=bind,source=none,target=/n a\n", `Dockerfile:2: RUN: --mount=type=bind: the context has no "none"`},
		"secret":          {"FROM x\nRUN --mount=type=secret,id=a,required a\n", `Dockerfile:2: RUN: --mount=type=secret: it requires secret "a"; give it by --secret id=a,src=FILE`},
		"missing file":    {"FROM x\nCOPY app.py none /d/\n", `Dockerfile:2: COPY: the context has no "none"`},
		"outside":         {"FROM x\nCOPY ../x /\n", `Dockerfile:2: COPY: "../x" is outside of the context`},
		"outside by link": {"FROM x\nCOPY out /\n", `Dockerfile:2: COPY: "out" leads out of the context by a link`},
		"absolute link":   {"FROM x\nCOPY abs /\n", `Dockerfile:2: COPY: "abs" leads out of the context by a link`},
		"no directory":    {"FROM x\nCOPY app.py b.py /d\n", `Dockerfile:2: COPY of several sources needs a directory as its destination: add a / to "/d"`},
		"mode":            {"FROM x\nCOPY --chmod=u+x app.py /d\n", "Dockerfile:2: COPY --chmod=u+x is not supported yet; use an octal mode such as 0755"},
		"variable":        {"FROM x\nWORKDIR ${A:?is needed}\n", "Dockerfile:2: WORKDIR: expand ${A:?is needed}: A: is needed"},
		"no user":         {"FROM x\nUSER $A\n", "Dockerfile:2: USER has no name"},
		"heredoc":         {"FROM x\nRUN <<EOF\na\n", "Dockerfile:2: unterminated heredoc"},
		"too many":        {"FROM x\n" + strings.Repeat("ENV A=1\n", 300), "Dockerfile: makes 304 steps, the maximum is 256; join some of its instructions"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p, err := Parse([]byte(tt.file), Options{Name: "Dockerfile", Context: open(t, inTheContext)})
			if err == nil || !errors.Is(err, errs.ErrInvalid) || strings.TrimSuffix(err.Error(), ": "+errs.ErrInvalid.Error()) != tt.want {
				t.Errorf("plan %+v, error %v, want %q", p, err, tt.want)
			}
		})
	}
	if _, err := Parse([]byte("FROM x\n"), Options{Name: "D", Target: "no", Context: open(t, nil)}); err == nil || !strings.Contains(err.Error(), `D: has no stage "no"`) {
		t.Errorf("target: %v", err)
	}
}

// TestStages checks what a build takes files of: the stages and images that are needed, each once and after what it needs itself.
func TestStages(t *testing.T) {
	t.Parallel()
	p, err := Parse([]byte(`ARG TAG=1
FROM golang:$TAG AS Build_It
COPY app.py .
RUN --mount=type=cache,target=cache,id=c,sharing=locked,uid=7,mode=0700 --network=none make
FROM x AS unused
COPY --from=nowhere /a /b
FROM alpine
USER app
FROM build_it AS test
COPY --from=2 /etc/os-release /
RUN test
FROM debian
COPY --from=test --chown=7 --chmod=755 /a /b* /c/
COPY --from=Build_It --exclude=*.o --parents /x/./y /
COPY --from=ghcr.io/astral-sh/uv:latest /uv /bin/
RUN --mount=type=bind,from=2,source=lib,target=/lib2 --mount=type=bind,source=src,target=/w --mount=type=tmpfs,target=/t,size=1m \
  --mount=type=secret,id=k,env=KEY --mount=type=secret,target=/root/netrc,gid=3 --mount=type=secret,id=r,target=/run/secrets/r,required use
CMD x
`), Options{Name: "Dockerfile", Context: open(t, inTheContext), Secrets: []string{"r"}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range p.Stages {
		got = append(got, fmt.Sprintf("%s (%s) %s:%d", s.Name, s.Title, s.From.Image, s.From.Line))
		got = append(got, (&Plan{Steps: s.Steps}).lines()...)
	}
	got = append(append(got, "own "+p.From.Image), p.lines()...)
	want := []string{
		"stage-2 (2) alpine:7",
		"test (test) golang:1:2", "USER root", "WORKDIR /", "COPY app.py / root:root ''", "RUN '/bin/sh -c make'", "COPY /etc/os-release / '' ''", "RUN '/bin/sh -c test'",
		"build-it (build_it) golang:1:2", "USER root", "WORKDIR /", "COPY app.py / root:root ''", "RUN '/bin/sh -c make'",
		"image (ghcr.io/astral-sh/uv:latest) ghcr.io/astral-sh/uv:latest:15",
		"own debian", "USER root", "WORKDIR /", "COPY /a /c/ 7:7 0755", "COPY /x/./y / '' ''", "COPY /uv /bin/ '' ''", "RUN '/bin/sh -c use'", "USER user", "WORKDIR /home/user",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if from := p.Steps[2].From; from.Stage != "test" || !slices.Equal(from.Paths, []string{"/b*"}) {
		t.Errorf("%+v", from)
	}
	if from := p.Steps[3].From; from.Stage != "build-it" || !from.Parents || !slices.Equal(from.Exclude, []string{"*.o"}) {
		t.Errorf("%+v", from)
	}
	const wantMounts = "[{Type:Bind Target:/lib2 ID: Sharing: Stage:stage-2 FilesHash: Source:/lib Owner: Mode: SizeBytes:0 Env: Required:false} " +
		"{Type:Bind Target:/w ID: Sharing: Stage: FilesHash: Source:src Owner: Mode: SizeBytes:0 Env: Required:false} " +
		"{Type:Tmpfs Target:/t ID: Sharing: Stage: FilesHash: Source: Owner: Mode: SizeBytes:1048576 Env: Required:false} " +
		"{Type:Secret Target: ID:k Sharing: Stage: FilesHash: Source: Owner: Mode: SizeBytes:0 Env:KEY Required:false} " +
		"{Type:Secret Target:/root/netrc ID:netrc Sharing: Stage: FilesHash: Source: Owner:0:3 Mode: SizeBytes:0 Env: Required:false} " +
		"{Type:Secret Target: ID:r Sharing: Stage: FilesHash: Source: Owner: Mode: SizeBytes:0 Env: Required:true}]"
	run := p.Steps[5]
	if text := fmt.Sprintf("%+v", run.Mounts); text != wantMounts || run.Bound[1].Count() != 4 || len(run.Bound) != 1 {
		t.Errorf("mounts %s\nwant   %s\n%+v", text, wantMounts, run.Bound)
	}
	compile := p.Stages[1].Steps[3]
	if text := fmt.Sprintf("%+v %s", compile.Mounts, compile.Network); text != "[{Type:Cache Target:/cache ID:c Sharing:Locked Stage: FilesHash: Source: Owner:7:0 Mode:0700 SizeBytes:0 Env: Required:false}] None" {
		t.Errorf("%s", text)
	}
	if want := []string{"Dockerfile:5: this stage is left out: stage 4 needs nothing of it"}; !slices.Equal(p.Notes, want) {
		t.Errorf("notes %q", p.Notes)
	}
}

func TestFetch(t *testing.T) {
	t.Parallel()
	sum := strings.Repeat("0123456789abcdef", 4)
	p, err := Parse([]byte("FROM x\nADD --checksum=sha256:"+sum+" --chown=app https://e.example/a/x.bin?v=1 /opt/\n"), Options{Name: "Dockerfile", Context: open(t, nil)})
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"curl -fsSL -o /opt/x.bin", "https://e.example/a/x.bin?v=1", sum + "  /opt/x.bin", "chown app: /opt/x.bin", "chmod 0600 /opt/x.bin"} {
		if s := p.Steps[2]; s.Type != template.StepRun || s.Args[1] != "root" || !strings.Contains(s.Args[0], part) {
			t.Errorf("%q has no %q", s.Args, part)
		}
	}
}

func TestFromTemplate(t *testing.T) {
	p, err := Parse([]byte("FROM scratch\nRUN a\n"), Options{Name: "D", FromTemplate: "base", Context: open(t, nil)})
	if err != nil || p.From != (Source{Template: "base", Line: 1}) {
		t.Errorf("%+v, %v", p, err)
	}
	if s := p.Steps[2]; s.Line != 2 || s.Text != "RUN a" || s.Type != template.StepRun {
		t.Errorf("step %+v", s)
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"FROM x\nRUN a\nCOPY a* b /c/\n", "ARG A=1\nFROM x:$A AS b\nFROM b\nENV P=${A%%1} Q=$P\n", "FROM x\nRUN <<A cat <<-'B'\n1\nA\n2\nB\n",
		"# escape=`\nFROM x\nRUN a `\nb\n", "FROM x\nHEALTHCHECK --retries=2 CMD [\"a\"]\nENTRYPOINT []\nSHELL [\"a\"]\nCMD a\n", "FROM x\nCOPY <<A <<B /c/\n$X\nA\nB\n", "FROM x\nUSER :\nWORKDIR ..\n",
		"FROM x AS b\nRUN --mount=type=cache,target=/c,sharing=locked --mount=source=a,target=/d --network=none y\nFROM b\nCOPY --from=0 --parents --exclude=z /a/./b* /c/\n",
		"FROM x\nADD --checksum=sha256:0 https://h/x /y/\nADD --unpack a /z\nRUN --mount=type=secret,env=A,id=b --mount=type=tmpfs,size=1k,target=x c\n",
	} {
		f.Add([]byte(seed))
	}
	dir := f.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a"), nil, 0o644); err != nil {
		f.Fatal(err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = root.Close() })
	f.Fuzz(func(t *testing.T, content []byte) {
		p, err := Parse(content, Options{Name: "D", Context: root})
		if err != nil {
			if !errors.Is(err, errs.ErrInvalid) {
				t.Errorf("error of another kind: %v", err)
			}
			return
		}
		for i, s := range p.Steps {
			if len(s.Args) == 0 || s.Line < 1 || (s.Type == template.StepCopy) != (s.Files != nil || s.From != nil) || s.Type == template.StepEnv && len(s.Args)%2 != 0 {
				t.Errorf("step %d: %s", i, fmt.Sprintf("%+v", s))
			}
		}
	})
}
