package envd_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

const testToken = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0"

func TestSignMatchesTheSDK(t *testing.T) {
	got := envd.Sign("hello.txt", envd.OpRead, "user", testToken, nil)
	if want := "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"; got != want {
		t.Errorf("Sign = %s, want %s", got, want)
	}
}

func TestVerify(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	later, earlier := now.Add(time.Minute), now.Add(-time.Minute)
	sign := func(exp *time.Time) string { return envd.Sign("a b", envd.OpWrite, "u", testToken, exp) }
	for name, tc := range map[string]struct {
		signature, path string
		op              envd.Operation
		user, token     string
		expiry          *time.Time
		want            error
	}{
		"good":                {sign(nil), "a b", envd.OpWrite, "u", testToken, nil, nil},
		"good with expiry":    {sign(&later), "a b", envd.OpWrite, "u", testToken, &later, nil},
		"expires this second": {sign(&now), "a b", envd.OpWrite, "u", testToken, &now, nil},
		"missing":             {"", "a b", envd.OpWrite, "u", testToken, nil, envd.ErrSignatureMissing},
		"other path":          {sign(nil), "a c", envd.OpWrite, "u", testToken, nil, envd.ErrSignatureInvalid},
		"other operation":     {sign(nil), "a b", envd.OpRead, "u", testToken, nil, envd.ErrSignatureInvalid},
		"other user":          {sign(nil), "a b", envd.OpWrite, "", testToken, nil, envd.ErrSignatureInvalid},
		"other token":         {sign(nil), "a b", envd.OpWrite, "u", "x", nil, envd.ErrSignatureInvalid},
		"no token":            {envd.Sign("a b", envd.OpWrite, "u", "", nil), "a b", envd.OpWrite, "u", "", nil, envd.ErrSignatureInvalid},
		"expiry taken away":   {sign(&later), "a b", envd.OpWrite, "u", testToken, nil, envd.ErrSignatureInvalid},
		"expiry put off":      {sign(&earlier), "a b", envd.OpWrite, "u", testToken, &later, envd.ErrSignatureInvalid},
		"expired":             {sign(&earlier), "a b", envd.OpWrite, "u", testToken, &earlier, envd.ErrSignatureExpired},
	} {
		t.Run(name, func(t *testing.T) {
			err := envd.Verify(tc.signature, tc.path, tc.op, tc.user, tc.token, tc.expiry, now)
			if !errors.Is(err, tc.want) {
				t.Errorf("Verify = %v, want %v", err, tc.want)
			}
		})
	}
}

func FuzzVerify(f *testing.F) {
	f.Add("v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E", "hello.txt", "user", int64(0))
	f.Add("", "", "", int64(-1))
	f.Fuzz(func(t *testing.T, signature, path, user string, exp int64) {
		expiry := time.Unix(exp, 0)
		if envd.Verify(signature, path, envd.OpWrite, user, testToken, &expiry, expiry) == nil &&
			signature != envd.Sign(path, envd.OpWrite, user, testToken, &expiry) {
			t.Error("a forged signature was accepted")
		}
		good := envd.Sign(path, envd.OpWrite, user, testToken, &expiry)
		if err := envd.Verify(good, path, envd.OpWrite, user, testToken, &expiry, expiry); err != nil {
			t.Errorf("own signature refused: %v", err)
		}
	})
}

func TestIsInternal(t *testing.T) {
	for path, want := range map[string]bool{
		"/init": true, "/upgrade": true, "/freeze": true, "/unfreeze": true, "/restored": true, "/collapse": true, "/fsfreeze": true,
		"/fsthaw": true, "/internal/entrypoint": true, "/internal/logs": true, "/internal": true,
		"//init": true, "/init/": true, "/x/../init": true, "/INIT": true, "init": true, "/./freeze/.": true,
		"/": false, "": false, "/health": false, "/files": false, "/files/compose": false, "/metrics": false, "/envs": false,
		"/process.Process/Start": false, "/initial": false, "/internals": false, "/x/init": false,
	} {
		if got := envd.IsInternal(path); got != want {
			t.Errorf("IsInternal(%q) = %v, want %v", path, got, want)
		}
	}
}

func TestConfigRoundTrip(t *testing.T) {
	want := &envd.Config{
		SandboxID: "abc", Entrypoint: []string{"/bin/sleep", "1"}, Env: map[string]string{"A": "b=c"},
		Workdir: "/srv", User: "1000:1000", Port: 5, Hosts: []envd.HostEntry{{IP: "127.0.0.1", Names: []string{"localhost"}}},
		AccessToken: "secret",
	}
	file := filepath.Join(t.TempDir(), "config.json")
	if err := envd.WriteConfig(file, want); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v lets others read the token", st.Mode())
	}
	got, err := envd.ReadConfig(file)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("read %+v, want %+v", got, want)
	}
}

func TestReadConfigRefuses(t *testing.T) {
	for name, tc := range map[string]struct{ content, want string }{
		"unknown field":  {`{"port":1,"colour":"red"}`, `unknown field "colour"`},
		"not JSON":       {`port: 1`, "decode config"},
		"port":           {`{"port":70000}`, "port: 70000"},
		"any port":       {`{"port":-1}`, "portFile"},
		"workdir":        {`{"workdir":"here"}`, "workdir"},
		"defaultWorkdir": {`{"defaultWorkdir":"here"}`, "defaultWorkdir"},
		"entrypoint":     {`{"entrypoint":[""]}`, "entrypoint"},
		"systemFiles":    {`{"systemFiles":{"/etc/passwd":""}}`, "systemFiles"},
		"env":            {`{"env":{"A=B":"c"}}`, "env"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "config.json")
			if err := os.WriteFile(file, []byte(tc.content), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := envd.ReadConfig(file); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v does not name %q", err, tc.want)
			}
		})
	}
	if _, err := envd.ReadConfig(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}

func TestClientSendsIdentityAndReadsErrors(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, _, _ := r.BasicAuth()
		if r.Header.Get("X-Access-Token") != "tok" || user != "ann" || r.Header.Get("E2b-Sandbox-Id") != "id1" {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		w.WriteHeader(http.StatusNotFound)
		if _, err := io.WriteString(w, `{"code":404,"message":"path '/x' does not exist"}`); err != nil {
			t.Error(err)
		}
	}))
	defer srv.Close()
	c, err := envd.NewClient(envd.ClientConfig{
		HTTP: srv.Client(), BaseURL: srv.URL + "/", Token: func() string { return "tok" }, User: "ann",
		Header: http.Header{envd.HeaderSandboxID: {"id1"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Download(t.Context(), "/x")
	var refused *envd.Error
	if !errors.As(err, &refused) || refused.Status != 404 || refused.Message != "path '/x' does not exist" {
		t.Errorf("error %v", err)
	}
}

func TestNewClientRefuses(t *testing.T) {
	for _, base := range []string{"", "10.0.0.1:49983", "ftp://x", "http://"} {
		if _, err := envd.NewClient(envd.ClientConfig{HTTP: http.DefaultClient, BaseURL: base}); err == nil {
			t.Errorf("base URL %q was accepted", base)
		}
	}
	if _, err := envd.NewClient(envd.ClientConfig{BaseURL: "http://x"}); err == nil {
		t.Error("a client without http.Client was accepted")
	}
}

func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		end  *processpb.ProcessEvent_EndEvent
		want int
	}{
		{&processpb.ProcessEvent_EndEvent{Exited: true, ExitCode: 0, Status: "exit status 0"}, 0},
		{&processpb.ProcessEvent_EndEvent{Exited: true, ExitCode: 42}, 42},
		{&processpb.ProcessEvent_EndEvent{ExitCode: -1, Status: "signal: killed"}, 137},
		{&processpb.ProcessEvent_EndEvent{ExitCode: -1, Status: "signal: segmentation fault (core dumped)"}, 139},
		{&processpb.ProcessEvent_EndEvent{ExitCode: -1, Status: "who knows"}, 255},
	} {
		if got := envd.ExitCode(c.end); got != c.want {
			t.Errorf("%s: %d, want %d", c.end.GetStatus(), got, c.want)
		}
	}
}

// TestProveIdentity has the values of OpenSSL: agents of older versions must prove themselves to newer clients.
func TestProveIdentity(t *testing.T) {
	addr := netip.MustParseAddr("10.1.2.3")
	if got := envd.ProveIdentity("secret", "", "ABCDEFGHIJKLMNOP", "i1", addr).Proof; got != "973a6126b43fc674357f394f47fb0858b859fa25a69998d07bdc56c8cd7e90e2" {
		t.Errorf("by token: %s", got)
	}
	got := envd.ProveIdentity("", envd.TokenSHA256("secret"), "ABCDEFGHIJKLMNOP", "i1", netip.MustParseAddr("2001:db8::1"))
	if want := (envd.IdentityProof{HashProof: "a089ae4f32e8593cd7ad69e259f78bde0180e9808edd3457193a52a19f9ac15f"}); got != want {
		t.Errorf("by its hash: %+v", got)
	}
	if got := envd.ProveIdentity("secret", "", "ABCDEFGHIJKLMNOP", "i1", addr); got.HashProof != envd.ProveIdentity("", envd.TokenSHA256("secret"), "ABCDEFGHIJKLMNOP", "i1", addr).HashProof {
		t.Errorf("an agent that knows its token proves another hash: %+v", got)
	}
}
