package files

import (
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/klauspost/compress/gzip"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Upload serves POST /files.
func (s *HTTP) Upload(w http.ResponseWriter, r *http.Request) error {
	acc, err := s.authorize(r, envd.OpWrite)
	if err != nil {
		return err
	}
	metadata, err := uploadMetadata(r.Header)
	if err != nil {
		return err
	}
	body, err := plainBody(r)
	if err != nil {
		return err
	}
	up := &upload{service: s, acc: acc, metadata: metadata, query: r.URL.Query().Get(envd.QueryPath)}
	kind, params, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case kind == "application/octet-stream":
		if !r.URL.Query().Has(envd.QueryPath) {
			return reply.Refuse(http.StatusBadRequest, "path query parameter is required for raw body upload")
		}
		err = up.file(up.query, body)
	case strings.HasPrefix(kind, "multipart/") && params["boundary"] != "":
		err = up.parts(multipart.NewReader(body, params["boundary"]))
	default:
		return reply.Refuse(http.StatusBadRequest, "unsupported content type: %q, expected multipart/form-data or application/octet-stream", r.Header.Get("Content-Type"))
	}
	if err != nil {
		return err
	}
	return reply.JSON(w, up.done)
}

// upload is one request's work.
type upload struct {
	service  *HTTP
	acc      account.User
	metadata map[string]string
	query    string
	done     []envd.FileInfo
}

// parts takes the parts named file; others are passed over.
func (u *upload) parts(mr *multipart.Reader) error {
	u.done = []envd.FileInfo{}
	for {
		part, err := mr.NextRawPart()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return reply.Refuse(http.StatusBadRequest, "read form: %w", err)
		}
		if part.FormName() != "file" {
			continue
		}
		path := u.query
		if path == "" {
			// FileName would keep the last element alone.
			_, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if err != nil || params["filename"] == "" {
				return reply.Refuse(http.StatusBadRequest, "a part named file needs a filename, or the request a path")
			}
			path = params["filename"]
		}
		if err := u.file(path, part); err != nil {
			return err
		}
	}
}

// file writes one file.
func (u *upload) file(name string, content io.Reader) error {
	_, workdir := u.service.Users.Settings.Defaults()
	path, err := account.ResolvePath(name, u.acc, workdir)
	if err != nil {
		return reply.WithStatus(http.StatusBadRequest, err)
	}
	for _, f := range u.done {
		if f.Path == path {
			return reply.Refuse(http.StatusBadRequest, "you cannot upload multiple files to the same path '%s' in one upload request, only the first specified file was uploaded", path)
		}
	}
	src := &bodyReader{r: content}
	if err := u.service.Uploads.put(path, src, u.acc, u.metadata); err != nil {
		if src.err != nil {
			return reply.Refuse(http.StatusBadRequest, "read upload: %w", src.err)
		}
		return writeFileError(path, err)
	}
	u.done = append(u.done, envd.FileInfo{Path: path, Name: filepath.Base(path), Type: "file", Metadata: u.metadata})
	return nil
}

// bodyReader records that the sender failed, not the disk.
type bodyReader struct {
	r   io.Reader
	err error
}

func (b *bodyReader) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.err = err
	}
	return n, err
}

func writeFileError(path string, err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return reply.Refuse(http.StatusInsufficientStorage, "not enough disk space available")
	case errors.Is(err, syscall.EISDIR):
		return reply.Refuse(http.StatusBadRequest, "path is a directory: %s", path)
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP):
		return reply.WithStatus(http.StatusBadRequest, err)
	case errors.Is(err, syscall.ENOTSUP):
		return reply.Refuse(http.StatusBadRequest, "the filesystem of %s keeps no metadata", path)
	case errors.Is(err, os.ErrPermission), errors.Is(err, syscall.EROFS):
		return reply.WithStatus(http.StatusForbidden, err)
	}
	return err
}

// uploadMetadata reads the metadata of an upload; nil if there is none.
func uploadMetadata(h http.Header) (map[string]string, error) {
	var m map[string]string
	for k, vs := range h {
		key, ok := strings.CutPrefix(k, envd.HeaderMetadataPrefix)
		if !ok || key == "" {
			continue
		}
		key = strings.ToLower(key)
		if len(envd.XattrMetadataPrefix)+len(key) > 255 {
			return nil, reply.Refuse(http.StatusBadRequest, "metadata: the key %q is too long", key)
		}
		for _, c := range vs[0] {
			if c < 0x20 || c > 0x7e {
				return nil, reply.Refuse(http.StatusBadRequest, "metadata: the value of %q is not printable US-ASCII", key)
			}
		}
		if m == nil {
			m = map[string]string{}
		}
		m[key] = vs[0]
	}
	return m, nil
}

// plainBody undoes the request's Content-Encoding.
func plainBody(r *http.Request) (io.Reader, error) {
	switch enc := strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))); enc {
	case "", "identity":
		return r.Body, nil
	case "gzip":
		z, err := gzip.NewReader(r.Body)
		if err != nil {
			return nil, reply.Refuse(http.StatusBadRequest, "decompress request body: %w", err)
		}
		return z, nil
	default:
		return nil, reply.Refuse(http.StatusBadRequest, "unsupported Content-Encoding: %q, expected gzip", enc)
	}
}

// Compose serves POST /files/compose: it joins files and removes them.
func (s *HTTP) Compose(w http.ResponseWriter, r *http.Request) error {
	var req envd.ComposeRequest
	if err := reply.ReadJSON(w, r, &req); err != nil {
		return err
	}
	if len(req.SourcePaths) == 0 {
		return reply.Refuse(http.StatusBadRequest, "source_paths must not be empty")
	}
	if req.Destination == "" {
		return reply.Refuse(http.StatusBadRequest, "destination is required")
	}
	acc, err := s.Users.Named(req.Username)
	if err != nil {
		return reply.WithStatus(http.StatusUnauthorized, err)
	}
	_, workdir := s.Users.Settings.Defaults()
	dest, err := account.ResolvePath(req.Destination, acc, workdir)
	if err != nil {
		return reply.WithStatus(http.StatusBadRequest, err)
	}
	sources, err := composeSources(req.SourcePaths, dest, acc, workdir)
	if err != nil {
		return err
	}
	defer closeFiles(sources)
	readers := make([]io.Reader, len(sources))
	for i, f := range sources {
		readers[i] = f
	}
	if err := s.Uploads.put(dest, io.MultiReader(readers...), acc, nil); err != nil {
		return writeFileError(dest, err)
	}
	for _, f := range sources {
		if err := os.Remove(f.Name()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove source: %w", err)
		}
	}
	return reply.JSON(w, envd.FileInfo{Path: dest, Name: filepath.Base(dest), Type: "file"})
}

// composeSources opens all sources before anything is written.
func composeSources(names []string, dest string, acc account.User, workdir string) (files []*os.File, err error) {
	defer func() {
		if err != nil {
			closeFiles(files)
		}
	}()
	for _, name := range names {
		path, err := account.ResolvePath(name, acc, workdir)
		if err != nil {
			return files, reply.WithStatus(http.StatusBadRequest, err)
		}
		if path == dest {
			return files, reply.Refuse(http.StatusBadRequest, "source path %q cannot be the same as destination", name)
		}
		f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
		if err != nil {
			return files, reply.Refuse(http.StatusNotFound, "source file not found: %s", name)
		}
		files = append(files, f)
		if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
			return files, reply.Refuse(http.StatusBadRequest, "source path is not a regular file: %s", name)
		}
	}
	return files, nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // only read from
	}
}
