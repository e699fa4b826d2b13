package agent_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const octets = "application/octet-stream"

func filesURL(path string, more ...string) string {
	q := url.Values{"path": {path}}
	for i := 0; i+1 < len(more); i += 2 {
		q.Set(more[i], more[i+1])
	}
	return "/files?" + q.Encode()
}

func zip(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := io.WriteString(w, text)
	noError(t, err)
	noError(t, w.Close())
	return b.String()
}

func unzip(t *testing.T, text string) string {
	t.Helper()
	r, err := gzip.NewReader(strings.NewReader(text))
	noError(t, err)
	b, err := io.ReadAll(r)
	noError(t, err)
	return string(b)
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	noError(t, err)
	return string(b)
}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	noError(t, os.WriteFile(path, []byte(content), 0o644))
}

func TestDownload(t *testing.T) {
	a := start(t, envd.Config{})
	text := strings.Repeat("some text ", 1000)
	file := filepath.Join(a.dir, "a ü.txt")
	writeFile(t, file, text)
	for name, tc := range map[string]struct {
		header []string
		status int
		body   string
		want   map[string]string
	}{
		"plain":          {nil, 200, text, map[string]string{"Content-Encoding": "", "Content-Length": "10000", "Content-Disposition": "inline; filename*=utf-8''a%20%C3%BC.txt"}},
		"gzip":           {[]string{"Accept-Encoding", "gzip, deflate"}, 200, text, map[string]string{"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}},
		"gzip refused":   {[]string{"Accept-Encoding", "gzip;q=0"}, 200, text, map[string]string{"Content-Encoding": ""}},
		"plain liked":    {[]string{"Accept-Encoding", "gzip;q=0.5, identity"}, 200, text, map[string]string{"Content-Encoding": ""}},
		"star":           {[]string{"Accept-Encoding", "*"}, 200, text, map[string]string{"Content-Encoding": ""}},
		"nothing":        {[]string{"Accept-Encoding", "identity;q=0, gzip;q=0"}, 406, "", nil},
		"star forbidden": {[]string{"Accept-Encoding", "br, *;q=0"}, 406, "", nil},
		"bad quality":    {[]string{"Accept-Encoding", "gzip;q=2"}, 400, "", nil},
		"range":          {[]string{"Range", "bytes=5-8", "Accept-Encoding", "gzip"}, 206, "text", map[string]string{"Content-Range": "bytes 5-8/10000"}},
		"bad range":      {[]string{"Range", "bytes=20000-"}, 416, "", nil},
		"not modified":   {[]string{"If-Modified-Since", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)}, 304, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			status, h, body := a.do("GET", filesURL(file), "", tc.header...)
			if h.Get("Content-Encoding") == "gzip" {
				body = unzip(t, body)
			}
			if status != tc.status || (tc.status < 300 && body != tc.body) {
				t.Errorf("status %d, %d bytes", status, len(body))
			}
			for k, v := range tc.want {
				if h.Get(k) != v {
					t.Errorf("%s: %q, want %q", k, h.Get(k), v)
				}
			}
		})
	}
	if status, _, body := a.do("HEAD", filesURL(file), ""); status != 200 || body != "" {
		t.Errorf("HEAD: %d %q", status, body)
	}
	if status, _, body := a.do("GET", filesURL("/proc/self/stat"), ""); status != 200 || body == "" {
		t.Errorf("a file of /proc: %d %q", status, body)
	}
}

func errorOf(t *testing.T, body string) (code int, message string) {
	t.Helper()
	var e struct {
		Code    int
		Message string
	}
	if err := json.Unmarshal([]byte(body), &e); err != nil {
		t.Errorf("not an error of ours: %q", body)
	}
	return e.Code, e.Message
}

func TestFileErrors(t *testing.T) {
	a := start(t, envd.Config{})
	fifo := filepath.Join(a.dir, "fifo")
	noError(t, syscall.Mkfifo(fifo, 0o600))
	file := filepath.Join(a.dir, "file")
	writeFile(t, file, "x")
	for name, tc := range map[string]struct {
		method, url, body string
		header            []string
		status            int
		text              string
	}{
		"missing":         {"GET", filesURL(a.dir + "/none"), "", nil, 404, "path '" + a.dir + "/none' does not exist"},
		"below a file":    {"GET", filesURL(file + "/none"), "", nil, 404, "does not exist"},
		"directory":       {"GET", filesURL(a.dir), "", nil, 400, "path '" + a.dir + "' is a directory"},
		"pipe":            {"GET", filesURL(fifo), "", nil, 400, "not a regular file"},
		"zero byte":       {"GET", filesURL("/a\x00b"), "", nil, 400, "zero byte"},
		"other's home":    {"GET", filesURL("~nobody/x"), "", nil, 400, "~"},
		"user":            {"GET", filesURL(file, "username", "ghost"), "", nil, 401, "invalid username: 'ghost'"},
		"long name":       {"GET", filesURL("/" + strings.Repeat("x", 300)), "", nil, 400, "too long"},
		"no kind":         {"POST", filesURL(file), "x", nil, 400, "unsupported content type"},
		"no path":         {"POST", "/files", "x", []string{"Content-Type", octets}, 400, "path query parameter is required"},
		"no boundary":     {"POST", filesURL(file), "x", []string{"Content-Type", "multipart/form-data"}, 400, "unsupported content type"},
		"onto directory":  {"POST", filesURL(a.dir), "x", []string{"Content-Type", octets}, 400, "is a directory"},
		"under a file":    {"POST", filesURL(file + "/x/y"), "x", []string{"Content-Type", octets}, 400, "not a directory"},
		"bad gzip":        {"POST", filesURL(file), "x", []string{"Content-Type", octets, "Content-Encoding", "gzip"}, 400, "decompress"},
		"cut gzip":        {"POST", filesURL(file), zip(t, "text")[:15], []string{"Content-Type", octets, "Content-Encoding", "gzip"}, 400, "read upload"},
		"other encoding":  {"POST", filesURL(file), "x", []string{"Content-Type", octets, "Content-Encoding", "br"}, 400, "unsupported Content-Encoding"},
		"metadata value":  {"POST", filesURL(file), "x", []string{"Content-Type", octets, "X-Metadata-A", "\xc3\xbc"}, 400, "printable"},
		"metadata key":    {"POST", filesURL(file), "x", []string{"Content-Type", octets, "X-Metadata-" + strings.Repeat("k", 300), "v"}, 400, "too long"},
		"unknown route":   {"GET", "/nothing", "", nil, 404, "no route"},
		"wrong method":    {"PUT", filesURL(file), "x", nil, 404, "no route"},
		"compose nothing": {"POST", "/files/compose", "{}", nil, 400, "source_paths must not be empty"},
		"compose nowhere": {"POST", "/files/compose", `{"source_paths":["a"]}`, nil, 400, "destination is required"},
		"compose no file": {"POST", "/files/compose", `{"source_paths":["/no/such"],"destination":"/tmp/x"}`, nil, 404, "source file not found: /no/such"},
		"compose dir":     {"POST", "/files/compose", `{"source_paths":["/tmp"],"destination":"/tmp/x"}`, nil, 400, "not a regular file: /tmp"},
		"compose itself":  {"POST", "/files/compose", `{"source_paths":["/tmp/x"],"destination":"/tmp/../tmp/x"}`, nil, 400, "same as destination"},
		"not JSON":        {"POST", "/files/compose", `{`, nil, 400, "invalid request body"},
		"too much JSON":   {"POST", "/files/compose", `{"destination":"` + strings.Repeat("x", 5<<20) + `"}`, nil, 413, "larger"},
		"logs source":     {"GET", "/internal/logs?source=x", "", nil, 400, "source"},
		"logs follow":     {"GET", "/internal/logs?follow=x", "", nil, 400, "follow"},
	} {
		t.Run(name, func(t *testing.T) {
			status, _, body := a.do(tc.method, tc.url, tc.body, tc.header...)
			code, msg := errorOf(t, body)
			if status != tc.status || code != tc.status || !strings.Contains(msg, tc.text) {
				t.Errorf("%d %q, want %d %q", status, body, tc.status, tc.text)
			}
		})
	}
	if readFile(t, file) != "x" {
		t.Error("a refused upload changed the file")
	}
	noStaged(t, a.dir)
}

func noStaged(t *testing.T, dir string) {
	t.Helper()
	left, err := filepath.Glob(dir + "/.barchan-upload-*")
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestUpload(t *testing.T) {
	needRoot(t)
	a := start(t, envd.Config{})
	file := a.dir + "/new/dir/f.txt"
	upload := func(content string, header ...string) []envd.FileInfo {
		t.Helper()
		status, _, body := a.do("POST", filesURL(file, "username", "nobody"), content, append([]string{"Content-Type", octets}, header...)...)
		var infos []envd.FileInfo
		if err := json.Unmarshal([]byte(body), &infos); err != nil || status != 200 {
			t.Fatalf("%d %q", status, body)
		}
		return infos
	}
	want := []envd.FileInfo{{Path: file, Name: "f.txt", Type: "file", Metadata: map[string]string{"author": "ann", "k-2": "v 2"}}}
	if got := upload("one", "X-Metadata-Author", "ann", "X-Metadata-K-2", "v 2"); !reflect.DeepEqual(got, want) {
		t.Errorf("answer %+v", got)
	}
	for path, mode := range map[string]os.FileMode{file: 0o644, a.dir + "/new/dir": 0o755, a.dir + "/new": 0o755} {
		st, err := os.Stat(path)
		noError(t, err)
		if uid := st.Sys().(*syscall.Stat_t).Uid; uid != 65534 || st.Mode().Perm() != mode {
			t.Errorf("%s: owner %d, mode %v", path, uid, st.Mode())
		}
	}
	if e := stat(t, a.client("root"), file); !reflect.DeepEqual(e.GetMetadata(), want[0].Metadata) || e.GetOwner() != "nobody" {
		t.Errorf("stat: %v", e)
	}
	noError(t, os.Chmod(file, 0o755))
	upload("two") // metadata is replaced by none, the mode stays
	if e := stat(t, a.client("root"), file); len(e.GetMetadata()) != 0 || e.GetMode() != 0o755 || readFile(t, file) != "two" {
		t.Errorf("second upload: %v %q", e, readFile(t, file))
	}
	upload(zip(t, "three"), "Content-Encoding", "gzip")
	if readFile(t, file) != "three" {
		t.Errorf("gzip upload: %q", readFile(t, file))
	}
	noStaged(t, filepath.Dir(file))
}

func TestUploadThroughLinks(t *testing.T) {
	a := start(t, envd.Config{})
	// A link is written through, also one that leads to nothing yet.
	for _, link := range []string{a.dir + "/l1", a.dir + "/l2"} {
		target := link + ".target"
		if link == a.dir+"/l1" {
			writeFile(t, target, "old")
		}
		noError(t, os.Symlink(filepath.Base(target), link))
		_, err := a.client("root").Upload(t.Context(), link, strings.NewReader("through"), nil)
		noError(t, err)
		if st, err := os.Lstat(link); err != nil || st.Mode()&os.ModeSymlink == 0 || readFile(t, target) != "through" {
			t.Errorf("%s: %v %v %q", link, st, err, readFile(t, target))
		}
	}
	if _, err := a.client("root").Upload(t.Context(), "/dev/null", strings.NewReader("gone"), nil); err != nil {
		t.Error(err)
	}
	noStaged(t, a.dir)
}

// TestRequestAfterAFormWithoutItsEnd sends the last chunk of a form when the form itself has been read: on
// a busy machine it comes late. The connection must serve the next request.
func TestRequestAfterAFormWithoutItsEnd(t *testing.T) {
	a := start(t, envd.Config{})
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(a.base, "http://"))
	noError(t, err)
	defer func() { _ = conn.Close() }()
	file := a.dir + "/form.txt"
	form := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\ncontent\r\n--b--\r\n"
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n",
		filesURL(file), len(form), form)
	noError(t, err)
	eventually.True(t, "the file is written", func() bool {
		b, err := os.ReadFile(file)
		return err == nil && string(b) == "content"
	})
	in := bufio.NewReader(conn)
	for _, request := range []string{"0\r\n\r\n", "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"} {
		_, err := io.WriteString(conn, request)
		noError(t, err)
		res, err := http.ReadResponse(in, nil)
		noError(t, err)
		_, err = io.Copy(io.Discard, res.Body)
		noError(t, err)
		if _ = res.Body.Close(); res.StatusCode/100 != 2 {
			t.Errorf("after %q: status %d", request, res.StatusCode)
		}
	}
}

func TestMultipart(t *testing.T) {
	a := start(t, envd.Config{})
	form := func(parts ...string) (string, string) {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		for i := 0; i+2 < len(parts); i += 3 {
			p, err := w.CreateFormFile(parts[i], parts[i+1])
			noError(t, err)
			_, err = io.WriteString(p, parts[i+2])
			noError(t, err)
		}
		noError(t, w.Close())
		return b.String(), w.FormDataContentType()
	}
	body, kind := form("file", a.dir+"/m/1", "one", "other", "x", "passed over", "file", a.dir+"/m/2", "two")
	status, _, answer := a.do("POST", "/files", body, "Content-Type", kind)
	want := fmt.Sprintf(`[{"path":"%[1]s/m/1","name":"1","type":"file"},{"path":"%[1]s/m/2","name":"2","type":"file"}]`, a.dir)
	if status != 200 || answer != want || readFile(t, a.dir+"/m/1") != "one" || readFile(t, a.dir+"/m/2") != "two" {
		t.Errorf("%d %s", status, answer)
	}
	// The request's path wins, so two files cannot be.
	body, kind = form("file", "ignored", "one", "file", "ignored too", "two")
	status, _, answer = a.do("POST", filesURL(a.dir+"/m/3"), body, "Content-Type", kind)
	if status != 400 || !strings.Contains(answer, "multiple files to the same path") || readFile(t, a.dir+"/m/3") != "one" {
		t.Errorf("%d %s", status, answer)
	}
	body, kind = form("file", a.dir+"/m/4", "cut")
	status, _, answer = a.do("POST", "/files", body[:len(body)-20], "Content-Type", kind)
	if _, err := os.Stat(a.dir + "/m/4"); status != 400 || !os.IsNotExist(err) {
		t.Errorf("cut form: %d %s, file: %v", status, answer, err)
	}
}

// A client that goes in the middle changes nothing.
func TestBrokenUploadChangesNothing(t *testing.T) {
	a := start(t, envd.Config{})
	file := a.dir + "/f"
	writeFile(t, file, "old")
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(a.base, "http://"))
	noError(t, err)
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: 1000000\r\n\r\npart of it", filesURL(file), octets)
	eventually.True(t, "upload under way", func() bool {
		m, err := filepath.Glob(a.dir + "/.barchan-upload-*")
		return err == nil && len(m) == 1
	})
	noError(t, conn.Close())
	eventually.True(t, "staged file gone", func() bool {
		m, err := filepath.Glob(a.dir + "/.barchan-upload-*")
		return err == nil && len(m) == 0
	})
	if readFile(t, file) != "old" {
		t.Errorf("file is %q", readFile(t, file))
	}
}

func TestFullDisk(t *testing.T) {
	needRoot(t)
	a := start(t, envd.Config{}, "unshare", "--mount", "sh", "-c", `mkdir /tmp/.barchan-full-$$ && mount -t tmpfs -o size=64k none /mnt && rmdir /tmp/.barchan-full-$$ && exec "$0"`)
	writeBig := func() (int, string) {
		status, _, body := a.do("POST", filesURL("/mnt/f"), strings.Repeat("x", 1<<20), "Content-Type", octets)
		return status, body
	}
	if status, _, body := a.do("POST", filesURL("/mnt/f"), "small", "Content-Type", octets); status != 200 {
		t.Fatalf("%d %s", status, body)
	}
	if status, body := writeBig(); status != 507 || !strings.Contains(body, "not enough disk space available") {
		t.Errorf("%d %s", status, body)
	}
	if status, _, body := a.do("GET", filesURL("/mnt/f"), ""); status != 200 || body != "small" {
		t.Errorf("after a full disk: %d %q", status, body)
	}
	r := run(t, a.client("root"), sh("ls -A /mnt"))
	if r.stdout != "f\n" {
		t.Errorf("left behind: %q", r.stdout)
	}
}

// A mount point cannot be replaced, so it is overwritten.
func TestUploadOntoAMount(t *testing.T) {
	needRoot(t)
	a := start(t, envd.Config{}, "unshare", "--mount", "sh", "-c", `mount -t tmpfs none /mnt && echo old > /mnt/a && touch /mnt/b && mount --bind /mnt/a /mnt/b && exec "$0"`)
	c := a.client("root")
	_, err := c.Upload(t.Context(), "/mnt/b", strings.NewReader("new"), map[string]string{"k": "v"})
	noError(t, err)
	if r := run(t, c, sh("cat /mnt/a; ls -A /mnt")); r.stdout != "newa\nb\n" {
		t.Errorf("%q %q", r.stdout, r.stderr)
	}
	if e := stat(t, c, "/mnt/b"); e.GetMetadata()["k"] != "v" {
		t.Errorf("metadata %v", e.GetMetadata())
	}
	_, err = c.Upload(t.Context(), "/mnt/b", strings.NewReader("newer"), nil)
	noError(t, err)
	if e := stat(t, c, "/mnt/b"); len(e.GetMetadata()) != 0 || e.GetSize() != 5 {
		t.Errorf("second upload: %v", e)
	}
}

func TestCompose(t *testing.T) {
	a := start(t, envd.Config{})
	c := a.client("root")
	writeFile(t, a.dir+"/1", "one ")
	writeFile(t, a.dir+"/2", "two")
	writeFile(t, a.dir+"/d", "old")
	info, err := c.Compose(t.Context(), envd.ComposeRequest{SourcePaths: []string{a.dir + "/1", a.dir + "/2"}, Destination: a.dir + "/d"})
	want := envd.FileInfo{Path: a.dir + "/d", Name: "d", Type: "file"}
	if err != nil || !reflect.DeepEqual(info, want) || readFile(t, a.dir+"/d") != "one two" {
		t.Errorf("%+v %v %q", info, err, readFile(t, a.dir+"/d"))
	}
	for _, f := range []string{"/1", "/2"} {
		if _, err := os.Stat(a.dir + f); !os.IsNotExist(err) {
			t.Errorf("source %s: %v", f, err)
		}
	}
}

func TestSignedURLs(t *testing.T) {
	const token = "secret-token"
	a := start(t, envd.Config{AccessToken: token})
	file := a.dir + "/f"
	writeFile(t, file, "content")
	soon, past := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	exp := func(e time.Time) string { return fmt.Sprint(e.Unix()) }
	for name, tc := range map[string]struct {
		method string
		query  []string
		header []string
		status int
		text   string
	}{
		"nothing":        {"GET", nil, nil, 401, "missing signature query parameter"},
		"header":         {"GET", nil, []string{"X-Access-Token", token}, 200, "content"},
		"wrong header":   {"GET", []string{"signature", envd.Sign(file, envd.OpRead, "", token, nil)}, []string{"X-Access-Token", "x"}, 401, "unauthorized"},
		"signature":      {"GET", []string{"signature", envd.Sign(file, envd.OpRead, "", token, nil)}, nil, 200, "content"},
		"user":           {"GET", []string{"username", "root", "signature", envd.Sign(file, envd.OpRead, "root", token, nil)}, nil, 200, "content"},
		"other user":     {"GET", []string{"username", "root", "signature", envd.Sign(file, envd.OpRead, "", token, nil)}, nil, 401, "invalid signature"},
		"for writing":    {"GET", []string{"signature", envd.Sign(file, envd.OpWrite, "", token, nil)}, nil, 401, "invalid signature"},
		"expires":        {"GET", []string{"signature", envd.Sign(file, envd.OpRead, "", token, &soon), "signature_expiration", exp(soon)}, nil, 200, "content"},
		"expired":        {"GET", []string{"signature", envd.Sign(file, envd.OpRead, "", token, &past), "signature_expiration", exp(past)}, nil, 401, "signature is already expired"},
		"not a time":     {"GET", []string{"signature", envd.Sign(file, envd.OpRead, "", token, nil), "signature_expiration", "x"}, nil, 401, "invalid signature"},
		"write":          {"POST", []string{"signature", envd.Sign(file, envd.OpWrite, "", token, nil)}, []string{"Content-Type", octets}, 200, "[{"},
		"write unsigned": {"POST", nil, []string{"Content-Type", octets}, 401, "missing signature"},
		"write by read":  {"POST", []string{"signature", envd.Sign(file, envd.OpRead, "", token, nil)}, []string{"Content-Type", octets}, 401, "invalid signature"},
	} {
		t.Run(name, func(t *testing.T) {
			status, _, body := a.do(tc.method, filesURL(file, tc.query...), map[string]string{"POST": "content"}[tc.method], tc.header...)
			if status != tc.status || !strings.Contains(body, tc.text) {
				t.Errorf("%d %q", status, body)
			}
		})
	}
}
