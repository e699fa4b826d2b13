package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"mime/multipart"
	"net/http"
	"testing"
)

// testRuntimeAPI makes the HTTP requests of agent-sandbox's clients to a secured sandbox, by its name and with an API key.
func testRuntimeAPI(t *testing.T, s *server) {
	s.mustKubectl(`
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: runtime}
spec:
  podTemplate: {spec: {containers: [{name: main, image: barchan.local/base:latest}]}}
`, "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/runtime", patience)
	send := func(key, method, path, kind string, body []byte) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.http+"/"+path, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range map[string]string{"X-Sandbox-ID": "runtime", "X-Sandbox-Namespace": "default", "X-Sandbox-Port": "49983", "X-API-Key": key, "Content-Type": kind} {
			req.Header.Set(name, value)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		b, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(b)
	}
	key := s.localKey()
	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	part, err := w.CreateFormFile("file", "script.py")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(part, "print(6 * 7)")
	_ = w.Close()
	if status, text := send(key, http.MethodPost, "upload", w.FormDataContentType(), form.Bytes()); status != http.StatusOK {
		t.Errorf("upload: %d %s", status, text)
	}
	var run struct {
		Stdout   string
		ExitCode int `json:"exit_code"`
	}
	status, text := send(key, http.MethodPost, "execute", "application/json", []byte(`{"command":"python3 script.py"}`))
	if err := json.Unmarshal([]byte(text), &run); err != nil || status != http.StatusOK || run.Stdout != "42\n" || run.ExitCode != 0 {
		t.Errorf("execute: %d %s, %v", status, text, err)
	}
	for path, want := range map[string]string{"download/script.py": "print(6 * 7)", "exists/script.py": `{"exists":true,"path":"script.py"}`, "exists/%2Fnone": `{"exists":false,"path":"/none"}`} {
		if status, text := send(key, http.MethodGet, path, "", nil); status != http.StatusOK || text != want {
			t.Errorf("%s: %d %s, want %s", path, status, text, want)
		}
	}
	if status, text := send(key, http.MethodGet, "list/%2Fhome", "", nil); status != http.StatusOK || !bytes.Contains([]byte(text), []byte(`"name":"user"`)) {
		t.Errorf("list: %d %s", status, text)
	}
	if status, _ := send("", http.MethodPost, "execute", "application/json", []byte(`{"command":"true"}`)); status != http.StatusUnauthorized {
		t.Errorf("without a key: %d", status)
	}
	other := s.data("key", "create", "--namespace", "other-runtime")
	if status, _ := send(string(bytes.TrimSpace([]byte(other))), http.MethodPost, "execute", "application/json", []byte(`{"command":"true"}`)); status != http.StatusUnauthorized {
		t.Errorf("with a key of another namespace: %d", status)
	}
	s.mustKubectl("", "delete", "sandbox", "runtime")
}
