package teams

import (
	"context"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// GetSSH is GET /ssh.
func (h *Handlers) GetSSH(context.Context, api.GetSSHRequestObject) (api.GetSSHResponseObject, error) {
	if h.SSH == nil {
		return nil, errs.Public(errs.ErrNotFound, "the server does not serve SSH; its operator turns it on with sshAddr")
	}
	return api.GetSSH200JSONResponse(*h.SSH), nil
}

// ListSSHKeys is GET /ssh-keys.
func (h *Handlers) ListSSHKeys(ctx context.Context, _ api.ListSSHKeysRequestObject) (api.ListSSHKeysResponseObject, error) {
	keys, err := h.Manager.Keys.ListSSHKeys(ctx, request.CallerOf(ctx).Identity)
	if err != nil {
		return nil, err
	}
	out := make(api.ListSSHKeys200JSONResponse, len(keys))
	for i, k := range keys {
		out[i] = sshKey(k)
	}
	return out, nil
}

// CreateSSHKey is POST /ssh-keys.
func (h *Handlers) CreateSSHKey(ctx context.Context, r api.CreateSSHKeyRequestObject) (api.CreateSSHKeyResponseObject, error) {
	k, err := h.Manager.Keys.AddSSHKey(ctx, request.CallerOf(ctx).Identity, r.Body.PublicKey)
	if err != nil {
		return nil, err
	}
	return api.CreateSSHKey201JSONResponse(sshKey(k)), nil
}

// DeleteSSHKey is DELETE /ssh-keys.
func (h *Handlers) DeleteSSHKey(ctx context.Context, r api.DeleteSSHKeyRequestObject) (api.DeleteSSHKeyResponseObject, error) {
	if err := h.Manager.Keys.DeleteSSHKey(ctx, request.CallerOf(ctx).Identity, r.Params.Fingerprint); err != nil {
		return nil, err
	}
	return api.DeleteSSHKey204Response{}, nil
}

func sshKey(k apikeys.SSHKey) api.SSHKey {
	return api.SSHKey{Fingerprint: k.Fingerprint, Comment: k.Comment, PublicKey: k.Line}
}
