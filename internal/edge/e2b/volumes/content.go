package volumes

import (
	"context"
	"io"
	"math"
	"net/http"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// ContentPath begins the paths of volumes' files, which need no key: the volume's own token gives access.
const ContentPath = "/volumecontent/"

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

// ServeContent has next, the mux of all routes, serve the files of a volume. A file's body is not held in memory.
func (h *Handlers) ServeContent(w http.ResponseWriter, r *http.Request, next http.Handler) {
	if h.Manager.Volumes == nil {
		h.Fail(w, r, noVolumes())
		return
	}
	id, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, ContentPath), "/")
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		h.Fail(w, r, errs.Public(errs.ErrUnauthenticated, "the volume's token is required: send it in the header Authorization: Bearer"))
		return
	}
	ref, err := h.Manager.Volumes.Authorize(r.Context(), id, strings.TrimSpace(token))
	if err == nil && r.Method != http.MethodPut {
		err = request.ReadBody(w, r, h.MaxBody)
	}
	if err != nil {
		h.Fail(w, r, err)
		return
	}
	if r.Method == http.MethodPut {
		r.Body = io.NopCloser(request.PacedBody(w, r, request.UploadTime))
	}
	next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), contentKey{}, content{ref, r.ContentLength})))
}

// GetVolumePath is GET /volumecontent/{volumeID}/path.
func (h *Handlers) GetVolumePath(ctx context.Context, r api.GetVolumePathRequestObject) (api.GetVolumePathResponseObject, error) {
	e, err := h.Manager.Volumes.Stat(contentOf(ctx).Ref, r.Params.Path)
	if err != nil {
		return nil, err
	}
	return api.GetVolumePath200JSONResponse(volumeEntry(e)), nil
}

// SetVolumePath is PATCH /volumecontent/{volumeID}/path.
func (h *Handlers) SetVolumePath(ctx context.Context, r api.SetVolumePathRequestObject) (api.SetVolumePathResponseObject, error) {
	a, err := attributes(r.Body.UID, r.Body.GID, r.Body.Mode)
	if err != nil {
		return nil, err
	}
	e, err := h.Manager.Volumes.SetAttributes(contentOf(ctx).Ref, r.Params.Path, a)
	if err != nil {
		return nil, err
	}
	return api.SetVolumePath200JSONResponse(volumeEntry(e)), nil
}

// DeleteVolumePath is DELETE /volumecontent/{volumeID}/path.
func (h *Handlers) DeleteVolumePath(ctx context.Context, r api.DeleteVolumePathRequestObject) (api.DeleteVolumePathResponseObject, error) {
	if err := h.Manager.Volumes.Remove(ctx, contentOf(ctx).Ref, r.Params.Path); err != nil {
		return nil, err
	}
	return api.DeleteVolumePath204Response{}, nil
}

// ListVolumeDir is GET /volumecontent/{volumeID}/dir.
func (h *Handlers) ListVolumeDir(ctx context.Context, r api.ListVolumeDirRequestObject) (api.ListVolumeDirResponseObject, error) {
	depth := 1
	if r.Params.Depth != nil {
		depth = int(*r.Params.Depth)
	}
	entries, err := h.Manager.Volumes.ListDir(ctx, contentOf(ctx).Ref, r.Params.Path, depth)
	if err != nil {
		return nil, err
	}
	out := make(api.ListVolumeDir200JSONResponse, len(entries))
	for i, e := range entries {
		out[i] = volumeEntry(e)
	}
	return out, nil
}

// MakeVolumeDir is POST /volumecontent/{volumeID}/dir.
func (h *Handlers) MakeVolumeDir(ctx context.Context, r api.MakeVolumeDirRequestObject) (api.MakeVolumeDirResponseObject, error) {
	a, err := attributes(r.Params.UID, r.Params.GID, r.Params.Mode)
	if err != nil {
		return nil, err
	}
	e, err := h.Manager.Volumes.MakeDir(contentOf(ctx).Ref, r.Params.Path, request.Deref(r.Params.Force), a)
	if err != nil {
		return nil, err
	}
	return api.MakeVolumeDir201JSONResponse(volumeEntry(e)), nil
}

// ReadVolumeFile is GET /volumecontent/{volumeID}/file.
func (h *Handlers) ReadVolumeFile(ctx context.Context, r api.ReadVolumeFileRequestObject) (api.ReadVolumeFileResponseObject, error) {
	body, e, err := h.Manager.Volumes.Read(contentOf(ctx).Ref, r.Params.Path)
	if err != nil {
		return nil, err
	}
	return api.ReadVolumeFile200ApplicationOctetStreamResponse{Body: body, ContentLength: e.Size}, nil
}

// WriteVolumeFile is PUT /volumecontent/{volumeID}/file.
func (h *Handlers) WriteVolumeFile(ctx context.Context, r api.WriteVolumeFileRequestObject) (api.WriteVolumeFileResponseObject, error) {
	a, err := attributes(r.Params.UID, r.Params.GID, r.Params.Mode)
	if err != nil {
		return nil, err
	}
	c := contentOf(ctx)
	e, err := h.Manager.Volumes.Write(c.Ref, volumes.Upload{Path: r.Params.Path, Body: r.Body, Size: c.size, Force: request.Deref(r.Params.Force), Attributes: a})
	if err != nil {
		return nil, err
	}
	return api.WriteVolumeFile201JSONResponse(volumeEntry(e)), nil
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
			return a, request.Invalid("%s: must be from 0 to %d", field.name, uint32(math.MaxUint32))
		}
		*field.to = new(uint32(*field.from))
	}
	return a, a.Check()
}

func volumeEntry(e volumetree.Entry) api.VolumeEntry {
	return api.VolumeEntry{
		Name: e.Name, Path: e.Path, Type: api.VolumeEntryType(e.Type), Target: request.Optional(e.Target), Size: e.Size, Mode: int64(e.Mode),
		UID: int64(e.UID), GID: int64(e.GID), Atime: e.Accessed.UTC(), Mtime: e.Modified.UTC(), Ctime: e.Changed.UTC(),
	}
}
