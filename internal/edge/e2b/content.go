package e2b

import (
	"context"
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
)

// contentPath begins the paths of volumes' files, which need no key: the volume's own token gives access.
const contentPath = "/volumecontent/"

// content is the volume of a request, and the length of its body.
type content struct {
	volumetree.Ref
	size int64
}

type contentKey struct{}

func contentOf(ctx context.Context) content {
	c, _ := ctx.Value(contentKey{}).(content)
	return c
}

// serveContent serves the files of a volume. A file's body is not held in memory.
func (s *Server) serveContent(w http.ResponseWriter, r *http.Request) {
	if s.manager.Volumes == nil {
		_ = noVolumes{}.write(w)
		return
	}
	id, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, contentPath), "/")
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		s.fail(w, r, errs.Public(errs.ErrUnauthenticated, "the volume's token is required: send it in the header Authorization: Bearer"))
		return
	}
	ref, err := s.manager.Volumes.Authorize(r.Context(), id, strings.TrimSpace(token))
	if err == nil && r.Method != http.MethodPut {
		err = s.readBody(w, r)
	}
	if err != nil {
		s.fail(w, r, err)
		return
	}
	if r.Method == http.MethodPut {
		r.Body = struct {
			*pacedBody
			noClose
		}{&pacedBody{Reader: r.Body, control: http.NewResponseController(w), until: time.Now().Add(uploadTime)}, noClose{}}
	}
	s.mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), contentKey{}, content{ref, r.ContentLength})))
}

// noClose leaves a body to net/http.
type noClose struct{}

// Close implements io.Closer.
func (noClose) Close() error { return nil }

// GetVolumePath is GET /volumecontent/{volumeID}/path.
func (h *handlers) GetVolumePath(ctx context.Context, r GetVolumePathRequestObject) (GetVolumePathResponseObject, error) {
	e, err := h.manager.Volumes.Stat(contentOf(ctx).Ref, r.Params.Path)
	if err != nil {
		return nil, err
	}
	return GetVolumePath200JSONResponse(volumeEntry(e)), nil
}

// SetVolumePath is PATCH /volumecontent/{volumeID}/path.
func (h *handlers) SetVolumePath(ctx context.Context, r SetVolumePathRequestObject) (SetVolumePathResponseObject, error) {
	a, err := attributes(r.Body.UID, r.Body.GID, r.Body.Mode)
	if err != nil {
		return nil, err
	}
	e, err := h.manager.Volumes.SetAttributes(contentOf(ctx).Ref, r.Params.Path, a)
	if err != nil {
		return nil, err
	}
	return SetVolumePath200JSONResponse(volumeEntry(e)), nil
}

// DeleteVolumePath is DELETE /volumecontent/{volumeID}/path.
func (h *handlers) DeleteVolumePath(ctx context.Context, r DeleteVolumePathRequestObject) (DeleteVolumePathResponseObject, error) {
	if err := h.manager.Volumes.Remove(ctx, contentOf(ctx).Ref, r.Params.Path); err != nil {
		return nil, err
	}
	return DeleteVolumePath204Response{}, nil
}

// ListVolumeDir is GET /volumecontent/{volumeID}/dir.
func (h *handlers) ListVolumeDir(ctx context.Context, r ListVolumeDirRequestObject) (ListVolumeDirResponseObject, error) {
	depth := 1
	if r.Params.Depth != nil {
		depth = int(*r.Params.Depth)
	}
	entries, err := h.manager.Volumes.ListDir(ctx, contentOf(ctx).Ref, r.Params.Path, depth)
	if err != nil {
		return nil, err
	}
	out := make(ListVolumeDir200JSONResponse, len(entries))
	for i, e := range entries {
		out[i] = volumeEntry(e)
	}
	return out, nil
}

// MakeVolumeDir is POST /volumecontent/{volumeID}/dir.
func (h *handlers) MakeVolumeDir(ctx context.Context, r MakeVolumeDirRequestObject) (MakeVolumeDirResponseObject, error) {
	a, err := attributes(r.Params.UID, r.Params.GID, r.Params.Mode)
	if err != nil {
		return nil, err
	}
	e, err := h.manager.Volumes.MakeDir(contentOf(ctx).Ref, r.Params.Path, deref(r.Params.Force), a)
	if err != nil {
		return nil, err
	}
	return MakeVolumeDir201JSONResponse(volumeEntry(e)), nil
}

// ReadVolumeFile is GET /volumecontent/{volumeID}/file.
func (h *handlers) ReadVolumeFile(ctx context.Context, r ReadVolumeFileRequestObject) (ReadVolumeFileResponseObject, error) {
	body, e, err := h.manager.Volumes.Read(contentOf(ctx).Ref, r.Params.Path)
	if err != nil {
		return nil, err
	}
	return ReadVolumeFile200ApplicationOctetStreamResponse{Body: body, ContentLength: e.Size}, nil
}

// WriteVolumeFile is PUT /volumecontent/{volumeID}/file.
func (h *handlers) WriteVolumeFile(ctx context.Context, r WriteVolumeFileRequestObject) (WriteVolumeFileResponseObject, error) {
	a, err := attributes(r.Params.UID, r.Params.GID, r.Params.Mode)
	if err != nil {
		return nil, err
	}
	c := contentOf(ctx)
	e, err := h.manager.Volumes.Write(c.Ref, volumes.Upload{Path: r.Params.Path, Body: r.Body, Size: c.size, Force: deref(r.Params.Force), Attributes: a})
	if err != nil {
		return nil, err
	}
	return WriteVolumeFile201JSONResponse(volumeEntry(e)), nil
}

func attributes(uid, gid, mode *int64) (a volumetree.Attributes, err error) {
	for _, field := range []struct {
		name string
		from *int64
		to   **uint32
	}{{"uid", uid, &a.UID}, {"gid", gid, &a.GID}, {"mode", mode, &a.Mode}} {
		if field.from == nil {
			continue
		}
		if *field.from < 0 || *field.from > math.MaxUint32 {
			return a, invalid("%s: must be from 0 to %d", field.name, uint32(math.MaxUint32))
		}
		*field.to = new(uint32(*field.from))
	}
	return a, a.Check()
}

func volumeEntry(e volumetree.Entry) VolumeEntry {
	return VolumeEntry{
		Name: e.Name, Path: e.Path, Type: VolumeEntryType(e.Type), Target: optional(e.Target), Size: e.Size, Mode: int64(e.Mode),
		UID: int64(e.UID), GID: int64(e.GID), Atime: e.Accessed.UTC(), Mtime: e.Modified.UTC(), Ctime: e.Changed.UTC(),
	}
}
