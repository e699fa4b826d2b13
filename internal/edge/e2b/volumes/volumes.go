package volumes

import (
	"context"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// Handlers serves volumes, and their files.
type Handlers struct {
	request.Errors
	Manager *manager.Manager
	// MaxBody bounds a request's body that is not a file, in bytes.
	MaxBody int64
}

// noVolumes is the error of a cluster.
func noVolumes() error {
	return request.Unavailable("volumes: not available on a Kubernetes cluster, where no node of Barchan keeps files; let the template mount a PersistentVolumeClaim")
}

// ListVolumes is GET /volumes.
func (h *Handlers) ListVolumes(ctx context.Context, _ api.ListVolumesRequestObject) (api.ListVolumesResponseObject, error) {
	if h.Manager.Volumes == nil {
		return nil, noVolumes()
	}
	all, err := h.Manager.Volumes.List(ctx, request.CallerOf(ctx).Namespace)
	if err != nil {
		return nil, err
	}
	out := make(api.ListVolumes200JSONResponse, len(all))
	for i := range all {
		v := &all[i]
		out[i] = api.Volume{
			VolumeID: v.ID, Name: v.Name, Capacity: &v.Capacity, Used: &v.Used, Files: &v.Files, Sandboxes: &v.Sandboxes,
			Backend: &v.Backend, Source: request.Optional(v.Source), ReadOnly: &v.ReadOnly,
			Ready: &v.Ready, Reason: request.Optional(v.Reason), Message: request.Optional(v.Message),
		}
	}
	return out, nil
}

// CreateVolume is POST /volumes.
func (h *Handlers) CreateVolume(ctx context.Context, r api.CreateVolumeRequestObject) (api.CreateVolumeResponseObject, error) {
	if h.Manager.Volumes == nil {
		return nil, noVolumes()
	}
	n := volumes.New{Name: r.Body.Name, Capacity: request.Deref(r.Body.Capacity), ReadOnly: request.Deref(r.Body.ReadOnly)}
	if e := r.Body.Nfs; e != nil {
		n.NFS = &barchan.NFSVolumeSource{Server: e.Server, Path: e.Path, MountOptions: e.MountOptions}
	}
	if b := r.Body.S3; b != nil {
		n.S3 = &volumes.Bucket{
			Endpoint: b.Endpoint, Region: request.Deref(b.Region), Bucket: b.Bucket, Prefix: request.Deref(b.Prefix), SecretName: request.Deref(b.SecretName),
			AccessKeyID: request.Deref(b.AccessKeyID), SecretAccessKey: request.Deref(b.SecretAccessKey), SessionToken: request.Deref(b.SessionToken), CA: request.Deref(b.Ca),
		}
	}
	v, err := h.Manager.Volumes.Create(ctx, request.CallerOf(ctx).Namespace, n)
	if err != nil {
		return nil, err
	}
	return api.CreateVolume201JSONResponse(volumeAndToken(ctx, v)), nil
}

// GetVolume is GET /volumes/{volumeID}.
func (h *Handlers) GetVolume(ctx context.Context, r api.GetVolumeRequestObject) (api.GetVolumeResponseObject, error) {
	if h.Manager.Volumes == nil {
		return nil, noVolumes()
	}
	v, err := h.Manager.Volumes.Get(ctx, request.CallerOf(ctx).Namespace, r.VolumeID)
	if err != nil {
		return nil, err
	}
	return api.GetVolume200JSONResponse(volumeAndToken(ctx, v)), nil
}

// DeleteVolume is DELETE /volumes/{volumeID}.
func (h *Handlers) DeleteVolume(ctx context.Context, r api.DeleteVolumeRequestObject) (api.DeleteVolumeResponseObject, error) {
	if h.Manager.Volumes == nil {
		return nil, noVolumes()
	}
	if err := h.Manager.Volumes.Delete(ctx, request.CallerOf(ctx).Namespace, r.VolumeID); err != nil {
		return nil, err
	}
	return api.DeleteVolume204Response{}, nil
}

func volumeAndToken(ctx context.Context, v volumes.Volume) api.VolumeAndToken {
	return api.VolumeAndToken{
		VolumeID: v.ID, Name: v.Name, Token: v.Token, Domain: request.Optional(request.CallerOf(ctx).Domain),
		Capacity: &v.Capacity, Used: &v.Used, Files: &v.Files, Sandboxes: &v.Sandboxes,
		Backend: &v.Backend, Source: request.Optional(v.Source), ReadOnly: &v.ReadOnly,
		Ready: &v.Ready, Reason: request.Optional(v.Reason), Message: request.Optional(v.Message),
	}
}
