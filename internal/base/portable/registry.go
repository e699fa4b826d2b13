package portable

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Scheme is the prefix of a reference to a registry.
const Scheme = "oci://"

// Place is a tag or digest of a repository. The credentials are those of its Access, or else of the
// user's Docker configuration.
type Place struct {
	scheme string // the prefix of its name, for messages
	ref    name.Reference
	by     http.RoundTripper
	keys   authn.Keychain
}

// ParsePlace parses oci://HOST/REPOSITORY:TAG, and the files that access names. The error is an
// errs.ErrInvalid.
func ParsePlace(text string, access Access) (Place, error) {
	rest, ok := strings.CutPrefix(text, Scheme)
	if !ok || !strings.Contains(rest, "/") {
		return Place{}, fmt.Errorf("%q: want %sHOST/REPOSITORY:TAG: %w", text, Scheme, errs.ErrInvalid)
	}
	ref, err := name.ParseReference(rest, access.nameOptions()...)
	if err != nil {
		return Place{}, fmt.Errorf("%q: want %sHOST/REPOSITORY:TAG: %w: %w", text, Scheme, err, errs.ErrInvalid)
	}
	return access.place(Scheme, ref)
}

func (a Access) nameOptions() []name.Option {
	opts := []name.Option{name.WithDefaultTag("latest")}
	if a.PlainHTTP {
		opts = append(opts, name.Insecure)
	}
	return opts
}

func (a Access) place(scheme string, ref name.Reference) (Place, error) {
	p := Place{scheme: scheme, ref: ref, keys: authn.DefaultKeychain}
	if a.Username != "" {
		p.keys = given{a.Username, a.Password}
	}
	var err error
	p.by, err = a.transport(ref.Context().RegistryStr())
	return p, err
}

// given is a password outside Docker's configuration.
type given struct{ username, password string }

// Resolve implements authn.Keychain.
func (g given) Resolve(authn.Resource) (authn.Authenticator, error) {
	return &authn.Basic{Username: g.username, Password: g.password}, nil
}

// String returns the reference as users write it.
func (p Place) String() string { return p.scheme + p.ref.Name() }

func (p Place) options(ctx context.Context, more ...remote.Option) []remote.Option {
	return append([]remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(p.keys), remote.WithTransport(p.by)}, more...)
}

// refusal gives errors of a registry their kind, and adds a remedy.
func (p Place) refusal(action string, err error) error {
	var untrusted *tls.CertificateVerificationError
	answer, answered := errors.AsType[*transport.Error](err)
	kind, text := errs.Kind(err), ""
	switch {
	case errors.Is(err, context.Canceled): // the user's own action
		return fmt.Errorf("%s %s: %w", action, p, err)
	case errors.As(err, &untrusted):
		kind, text = errs.ErrForbidden, fmt.Sprintf("its certificate is not trusted: %s; --ca-file, or SSL_CERT_FILE, names a file with the authority's", untrusted.Err)
	case errors.Is(err, errPlain):
		kind, text = errs.ErrForbidden, fmt.Sprintf("%s; if that is intended, --plain-http allows it", err)
	case answered && (answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden):
		kind, text = errs.ErrForbidden, p.denied(answer.StatusCode)
	case answered && answer.StatusCode == http.StatusNotFound:
		kind = errs.ErrNotFound
	case kind != nil:
		return fmt.Errorf("%s %s: %w", action, p, err)
	default:
		kind = errs.ErrUnavailable
	}
	if text == "" {
		text = err.Error()
	}
	return fmt.Errorf("%s %s: %s: %w", action, p, text, kind)
}

// denied returns possible reasons for such a response.
func (p Place) denied(status int) string {
	host := p.ref.Context().RegistryStr()
	auth, err := p.keys.Resolve(p.ref.Context())
	user, isGiven := p.keys.(given)
	switch {
	case isGiven:
		return fmt.Sprintf("access denied (%d) to %s with the password of %s", status, host, user.username)
	case err != nil:
		return fmt.Sprintf("access denied (%d), and Docker's configuration cannot be used: %s", status, err)
	case auth == authn.Anonymous:
		return fmt.Sprintf("access denied (%d): Docker's configuration has no password for %s; `docker login %s` writes one", status, host, host)
	default:
		return fmt.Sprintf("access denied (%d) with the password that Docker's configuration has for %s", status, host)
	}
}

// CheckPush starts an upload and cancels it, to report a missing permission before much is read.
func (p Place) CheckPush(ctx context.Context) error {
	if err := p.checkPush(ctx); err != nil {
		return p.refusal("push to", err)
	}
	return nil
}

func (p Place) checkPush(ctx context.Context) error {
	repository := p.ref.Context()
	auth, err := authn.Resolve(ctx, p.keys, repository)
	if err != nil {
		return err
	}
	by, err := transport.NewWithContext(ctx, repository.Registry, auth, p.by, []string{repository.Scope(transport.PushScope)})
	if err != nil {
		return err
	}
	request := func(method, address string, want ...int) (*url.URL, error) {
		req, err := http.NewRequestWithContext(ctx, method, address, http.NoBody)
		if err != nil {
			return nil, err
		}
		res, err := (&http.Client{Transport: by}).Do(req)
		if err != nil {
			return nil, err
		}
		defer func() { _ = res.Body.Close() }()
		if err := transport.CheckError(res, want...); err != nil {
			return nil, err
		}
		return res.Location()
	}
	begun, err := request(http.MethodPost, (&url.URL{
		Scheme: repository.Scheme(), Host: repository.RegistryStr(), Path: "/v2/" + repository.RepositoryStr() + "/blobs/uploads/",
	}).String(), http.StatusAccepted, http.StatusCreated)
	if errors.Is(err, http.ErrNoLocation) {
		return nil
	}
	if err == nil && begun.Host == repository.RegistryStr() {
		_, _ = request(http.MethodDelete, begun.String(), http.StatusNoContent, http.StatusOK, http.StatusAccepted) // not all registries support it
	}
	return err
}

// Push sends an artifact to a registry: each missing blob, then the manifests, the tag last. So an
// interrupted push leaves nothing under the tag.
func Push(ctx context.Context, r *Reader, to Place) error {
	for {
		b, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		if err := to.writeLayer(ctx, b); err != nil {
			return to.refusal("push "+b.Digest.String()+" to", err)
		}
		if err := b.Close(); err != nil { // blobs that the registry had are read all the same
			return err
		}
	}
	for _, b := range slices.Backward(r.small) {
		if err := to.put(ctx, r.Head, b); err != nil {
			return to.refusal("push to", err)
		}
	}
	return nil
}

// writeLayer sends a blob, which can be read once: there is no retry after its first byte.
func (p Place) writeLayer(ctx context.Context, b *Blob) error {
	once := &pushed{blob: b}
	again := func(err error) bool {
		passing, ok := errors.AsType[interface {
			error
			Temporary() bool
		}](err)
		return !once.used && ok && passing.Temporary()
	}
	return remote.WriteLayer(p.ref.Context(), once, p.options(ctx, remote.WithRetryPredicate(again))...)
}

// put sends a manifest or config.
func (p Place) put(ctx context.Context, h *Head, b smallBlob) error {
	if b.MediaType == ConfigType {
		in := NewBlob(b.Descriptor, io.NopCloser(strings.NewReader(string(b.content))))
		return p.writeLayer(ctx, in)
	}
	ref := p.ref
	if b.Digest != h.top.Digest {
		ref = p.ref.Context().Digest(b.Digest.String())
	}
	return remote.Put(ref, manifest{b}, p.options(ctx)...)
}

// manifest is a small blob that a registry accepts as a manifest.
type manifest struct{ smallBlob }

func (m manifest) RawManifest() ([]byte, error) { return m.content, nil }
func (m manifest) MediaType() (types.MediaType, error) {
	return types.MediaType(m.Descriptor.MediaType), nil
}

// pushed is a blob that is read once.
type pushed struct {
	blob *Blob
	used bool
}

func (p *pushed) Digest() (v1.Hash, error) { return v1.NewHash(p.blob.Digest.String()) }
func (p *pushed) DiffID() (v1.Hash, error) { return p.Digest() }
func (p *pushed) Size() (int64, error)     { return p.blob.Size, nil }

func (p *pushed) MediaType() (types.MediaType, error) {
	return types.MediaType(p.blob.MediaType), nil
}

func (p *pushed) Uncompressed() (io.ReadCloser, error) { return p.Compressed() }

func (p *pushed) Compressed() (io.ReadCloser, error) {
	if p.used {
		return nil, fmt.Errorf("blob %s cannot be sent twice: %w", p.blob.Digest, errs.ErrUnavailable)
	}
	p.used = true
	return io.NopCloser(p.blob), nil
}

// registry is a source of blobs.
type registry struct {
	Place
	top *remote.Descriptor
}

// Pull reads the manifests of an artifact in a registry. Its blobs are fetched as they are written.
func Pull(ctx context.Context, from Place) (*Layout, error) {
	d, err := remote.Get(from.ref, from.options(ctx)...)
	if err != nil {
		return nil, from.refusal("pull", err)
	}
	if len(d.Manifest) > maxJSON {
		return nil, from.refusal("pull", invalid("its manifest has %d bytes, want at most %d", len(d.Manifest), maxJSON))
	}
	l, err := layoutOf(ctx, descriptorOf(d.Descriptor), &registry{from, d})
	if err != nil {
		return nil, from.refusal("pull", err)
	}
	return l, nil
}

func (r *registry) open(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	at := r.ref.Context().Digest(d.Digest.String())
	switch d.MediaType {
	case ocispec.MediaTypeImageIndex, ocispec.MediaTypeImageManifest, dockerManifest:
		got := r.top
		if d.Digest.String() != r.top.Digest.String() {
			var err error
			if got, err = remote.Get(at, r.options(ctx)...); err != nil {
				return nil, err
			}
		}
		return io.NopCloser(strings.NewReader(string(got.Manifest))), nil
	}
	layer, err := remote.Layer(at, r.options(ctx)...)
	if err != nil {
		return nil, r.refusal("pull from", err)
	}
	in, err := layer.Compressed()
	if err != nil {
		return nil, r.refusal("pull from", err)
	}
	return &fetched{in, func(err error) error { return r.refusal("pull "+d.Digest.String()+" from", err) }}, nil
}

// fetched is the content of a blob from a registry, whose errors it returns.
type fetched struct {
	io.ReadCloser
	refusal func(error) error
}

func (f *fetched) Read(b []byte) (int, error) {
	n, err := f.ReadCloser.Read(b)
	if err != nil && !errors.Is(err, io.EOF) {
		err = f.refusal(err)
	}
	return n, err
}
