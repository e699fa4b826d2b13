package builds

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	ecrKeyID  = "AKIDTEST"
	ecrSecret = "s3cret/of+tests"
)

// fakeECR checks a request's signature and answers as Amazon does.
type fakeECR struct {
	calls  int
	hosts  []string
	answer func(w http.ResponseWriter)
}

func (f *fakeECR) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.calls++
	f.hosts = append(f.hosts, r.Host)
	body, _ := io.ReadAll(r.Body)
	again := r.Clone(r.Context())
	again.URL.Host, again.URL.Scheme = r.Host, "https"
	again.Header = http.Header{"Content-Type": r.Header["Content-Type"], "X-Amz-Target": r.Header["X-Amz-Target"]}
	again.Body, again.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	when, err := time.Parse("20060102T150405Z", r.Header.Get("X-Amz-Date"))
	if err == nil {
		err = v4.NewSigner().SignHTTP(r.Context(), aws.Credentials{AccessKeyID: ecrKeyID, SecretAccessKey: ecrSecret}, again,
			"44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a", "ecr", "eu-central-1", when) // SHA-256 of {}
	}
	if err != nil || string(body) != "{}" || r.Header.Get("X-Amz-Target") != "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken" || again.Header.Get("Authorization") != r.Header.Get("Authorization") {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, `{"__type":"UnrecognizedClientException","message":"The security token included in the request is invalid."}`)
		return
	}
	f.answer(w)
}

func token(text string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		fmt.Fprintf(w, `{"authorizationData":[{"authorizationToken":%q,"expiresAt":1.7e9,"proxyEndpoint":"https://1.dkr.ecr.eu-central-1.amazonaws.com"}]}`,
			base64.StdEncoding.EncodeToString([]byte(text)))
	}
}

// to sends all requests to a server, whatever their host.
func to(server *httptest.Server) *http.Client {
	c := server.Client()
	inner := c.Transport
	c.Transport = roundTrip(func(r *http.Request) (*http.Response, error) {
		r = r.Clone(r.Context())
		r.Host, r.URL.Host, r.URL.Scheme = r.URL.Host, server.Listener.Addr().String(), "http"
		return inner.RoundTrip(r)
	})
	return c
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A key of Amazon becomes the password of its registry, once for all images of a build; the key is in no credentials.
func TestKeysOfAmazon(t *testing.T) {
	fake := &fakeECR{answer: token("AWS:p4ss:word")}
	server := httptest.NewServer(fake)
	defer server.Close()
	e := ECR{Client: to(server)}
	key := Registry{Type: "aws", AccessKeyID: ecrKeyID, SecretAccessKey: ecrSecret, Region: "eu-central-1"}
	other := key
	what := &Instructions{FromImage: "1.dkr.ecr.eu-central-1.amazonaws.com/app", Registry: &key, Stages: []Stage{
		{FromImage: "1.dkr.ecr.eu-central-1.amazonaws.com/tools", Registry: &other}, {FromImage: "x"},
	}}
	if err := e.exchange(t.Context(), what); err != nil {
		t.Fatal(err)
	}
	if fake.calls != 1 || fake.hosts[0] != "api.ecr.eu-central-1.amazonaws.com" {
		t.Errorf("%d requests to %v", fake.calls, fake.hosts)
	}
	config, err := credentials(what)
	want := dockerAuth{"AWS", "p4ss:word"}
	if err != nil || config.Auths["1.dkr.ecr.eu-central-1.amazonaws.com"] != want || config.Auths["1.dkr.ecr.eu-central-1.amazonaws.com/tools"] != want || what.Stages[1].Registry != nil {
		t.Errorf("credentials %v, %v", config, err)
	}
	wrong, foreign := key, key
	wrong.SecretAccessKey = "other"
	foreign.Region = "cn-north-1"
	for name, c := range map[string]struct {
		r      Registry
		answer func(http.ResponseWriter)
		kind   error
		text   string
	}{
		"another secret": {wrong, nil, errs.ErrInvalid, "UnrecognizedClientException"},
		"another region": {foreign, nil, errs.ErrInvalid, "api.ecr.cn-north-1.amazonaws.com.cn refuses"},
		"no key":         {Registry{Type: "aws", SecretAccessKey: "x", Region: "eu-central-1"}, nil, errs.ErrInvalid, "awsAccessKeyId: "},
		"a host":         {Registry{Type: "aws", AccessKeyID: "x", SecretAccessKey: "x", Region: "evil.test/x-1"}, nil, errs.ErrInvalid, "awsRegion: "},
		"a fault":        {key, func(w http.ResponseWriter) { w.WriteHeader(http.StatusBadGateway) }, errs.ErrUnavailable, "502"},
		"no JSON":        {key, func(w http.ResponseWriter) { fmt.Fprint(w, "<html>") }, errs.ErrUnavailable, "without a token"},
		"no token":       {key, func(w http.ResponseWriter) { fmt.Fprint(w, `{"authorizationData":[]}`) }, errs.ErrUnavailable, "without a token"},
		"another user":   {key, token("root:x"), errs.ErrUnavailable, "another kind"},
		"too large":      {key, func(w http.ResponseWriter) { _, _ = w.Write(bytes.Repeat([]byte(" "), 1<<20)) }, errs.ErrUnavailable, "without a token"},
	} {
		t.Run(name, func(t *testing.T) {
			fake.answer = c.answer
			err := e.exchange(t.Context(), &Instructions{FromImage: "x", Registry: &c.r})
			text := errs.Text(err)
			if !errors.Is(err, c.kind) || !strings.Contains(text, c.text) || !strings.HasPrefix(text, "fromImageRegistry.aws") || strings.Contains(err.Error(), ecrSecret) {
				t.Errorf("error %v: %q", err, text)
			}
		})
	}
	server.Close()
	if err := e.exchange(t.Context(), &Instructions{FromImage: "x", Registry: &key}); !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(errs.Text(err), "cannot reach api.ecr") {
		t.Errorf("without a connection: %v", err)
	}
}
