// Package fakeapi is an API server in memory that only lists and watches, for tests of what waits for complete lists. It runs
// inside a synctest bubble, because it opens no connection. It neither stores nor validates objects.
package fakeapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"path"
	"sync"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// API answers lists and watches of all kinds.
type API struct {
	mu      sync.Mutex
	objects map[string][]client.Object // by resource; +checklocks:mu
	gates   map[string]chan struct{}   // by resource; +checklocks:mu
}

// New returns an API without objects.
func New() *API {
	return &API{objects: map[string][]client.Object{}, gates: map[string]chan struct{}{}}
}

// Config reaches the API.
func (a *API) Config() *rest.Config {
	return &rest.Config{Host: "http://fake", Transport: a, QPS: -1}
}

// Add puts objects of a resource, such as "sandboxes", into all later lists.
func (a *API) Add(resource string, objects ...client.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.objects[resource] = append(a.objects[resource], objects...)
}

// Hold delays the responses of a resource until release is called.
func (a *API) Hold(resource string) (release func()) {
	gate := make(chan struct{})
	a.mu.Lock()
	defer a.mu.Unlock()
	a.gates[resource] = gate
	return sync.OnceFunc(func() { close(gate) })
}

// RoundTrip implements http.RoundTripper.
func (a *API) RoundTrip(req *http.Request) (*http.Response, error) {
	resource := path.Base(req.URL.Path)
	a.mu.Lock()
	gate, objects := a.gates[resource], a.objects[resource]
	a.mu.Unlock()
	if gate != nil {
		select {
		case <-gate:
		case <-req.Context().Done():
			return nil, req.Context().Err()
		}
	}
	if req.Method != http.MethodGet {
		return nil, errors.New("the fake API only reads")
	}
	query := req.URL.Query()
	if query.Get("watch") == "" {
		return respond(http.StatusOK, io.NopCloser(bytes.NewReader(list(objects)))), nil
	}
	if query.Get("sendInitialEvents") == "true" { // the client lists instead
		status := `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422,"message":"sendInitialEvents is not supported"}`
		return respond(http.StatusUnprocessableEntity, io.NopCloser(bytes.NewReader([]byte(status)))), nil
	}
	r, w := io.Pipe()
	go func() { // ends with the request
		<-req.Context().Done()
		_ = w.CloseWithError(req.Context().Err())
	}()
	return respond(http.StatusOK, r), nil
}

func list(objects []client.Object) []byte {
	if objects == nil {
		objects = []client.Object{}
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]string{"resourceVersion": "100"}, "items": objects})
	if err != nil {
		panic(err) // of a test's own objects
	}
	return body
}

func respond(code int, body io.ReadCloser) *http.Response {
	return &http.Response{
		StatusCode: code, Status: http.StatusText(code), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: body,
	}
}
