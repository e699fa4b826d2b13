package e2b

import (
	"context"
	"net/http"

	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
)

// noVolumes is the response of a server without volumes.
type noVolumes struct{}

func (noVolumes) write(w http.ResponseWriter) error {
	writeError(w, http.StatusNotImplemented, "volumes: not available on this server, which has no node of its own that keeps files")
	return nil
}

// VisitListVolumesResponse implements the generated interface, as the others do.
func (n noVolumes) VisitListVolumesResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitCreateVolumeResponse implements the generated interface.
func (n noVolumes) VisitCreateVolumeResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitGetVolumeResponse implements the generated interface.
func (n noVolumes) VisitGetVolumeResponse(w http.ResponseWriter) error { return n.write(w) }

// VisitDeleteVolumeResponse implements the generated interface.
func (n noVolumes) VisitDeleteVolumeResponse(w http.ResponseWriter) error { return n.write(w) }

// ListVolumes is GET /volumes.
func (h *handlers) ListVolumes(ctx context.Context, _ ListVolumesRequestObject) (ListVolumesResponseObject, error) {
	if h.manager.Volumes == nil {
		return noVolumes{}, nil
	}
	all, err := h.manager.Volumes.List(ctx, callerOf(ctx).Namespace)
	if err != nil {
		return nil, err
	}
	out := make(ListVolumes200JSONResponse, len(all))
	for i, v := range all {
		out[i] = Volume{
			VolumeID: v.ID, Name: v.Name, Capacity: &v.Capacity, Used: &v.Used, Files: &v.Files, Sandboxes: &v.Sandboxes,
		}
	}
	return out, nil
}

// CreateVolume is POST /volumes.
func (h *handlers) CreateVolume(ctx context.Context, r CreateVolumeRequestObject) (CreateVolumeResponseObject, error) {
	if h.manager.Volumes == nil {
		return noVolumes{}, nil
	}
	v, err := h.manager.Volumes.Create(ctx, callerOf(ctx).Namespace, r.Body.Name, deref(r.Body.Capacity))
	if err != nil {
		return nil, err
	}
	return CreateVolume201JSONResponse(volumeAndToken(ctx, v)), nil
}

// GetVolume is GET /volumes/{volumeID}.
func (h *handlers) GetVolume(ctx context.Context, r GetVolumeRequestObject) (GetVolumeResponseObject, error) {
	if h.manager.Volumes == nil {
		return noVolumes{}, nil
	}
	v, err := h.manager.Volumes.Get(ctx, callerOf(ctx).Namespace, r.VolumeID)
	if err != nil {
		return nil, err
	}
	return GetVolume200JSONResponse(volumeAndToken(ctx, v)), nil
}

// DeleteVolume is DELETE /volumes/{volumeID}.
func (h *handlers) DeleteVolume(ctx context.Context, r DeleteVolumeRequestObject) (DeleteVolumeResponseObject, error) {
	if h.manager.Volumes == nil {
		return noVolumes{}, nil
	}
	if err := h.manager.Volumes.Delete(ctx, callerOf(ctx).Namespace, r.VolumeID); err != nil {
		return nil, err
	}
	return DeleteVolume204Response{}, nil
}

func volumeAndToken(ctx context.Context, v volumes.Volume) VolumeAndToken {
	return VolumeAndToken{
		VolumeID: v.ID, Name: v.Name, Token: v.Token, Domain: optional(callerOf(ctx).domain),
		Capacity: &v.Capacity, Used: &v.Used, Files: &v.Files, Sandboxes: &v.Sandboxes,
	}
}

// volumeMounts names the volumes that a sandbox mounts.
func (s *Server) volumeMounts(ctx context.Context, v sandboxes.Sandbox) *[]VolumeMount {
	if len(v.VolumeMounts) == 0 {
		return nil
	}
	out := make([]VolumeMount, len(v.VolumeMounts))
	for i, m := range v.VolumeMounts {
		out[i] = VolumeMount{Name: m.Volume, Path: m.Path}
		if s.manager.Volumes != nil {
			out[i].Name = s.manager.Volumes.NameOf(ctx, v.Namespace, m.Volume)
		}
	}
	return &out
}
