package e2b

import (
	"context"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
)

// GetSSH is GET /ssh.
func (h *handlers) GetSSH(context.Context, GetSSHRequestObject) (GetSSHResponseObject, error) {
	if h.ssh == nil {
		return nil, errs.Public(errs.ErrNotFound, "the server does not serve SSH; its operator turns it on with sshAddr")
	}
	return GetSSH200JSONResponse(*h.ssh), nil
}

// ListSSHKeys is GET /ssh-keys.
func (h *handlers) ListSSHKeys(ctx context.Context, _ ListSSHKeysRequestObject) (ListSSHKeysResponseObject, error) {
	keys, err := h.manager.Keys.ListSSHKeys(ctx, callerOf(ctx).Identity)
	if err != nil {
		return nil, err
	}
	out := make(ListSSHKeys200JSONResponse, len(keys))
	for i, k := range keys {
		out[i] = sshKey(k)
	}
	return out, nil
}

// CreateSSHKey is POST /ssh-keys.
func (h *handlers) CreateSSHKey(ctx context.Context, r CreateSSHKeyRequestObject) (CreateSSHKeyResponseObject, error) {
	k, err := h.manager.Keys.AddSSHKey(ctx, callerOf(ctx).Identity, r.Body.PublicKey)
	if err != nil {
		return nil, err
	}
	return CreateSSHKey201JSONResponse(sshKey(k)), nil
}

// DeleteSSHKey is DELETE /ssh-keys.
func (h *handlers) DeleteSSHKey(ctx context.Context, r DeleteSSHKeyRequestObject) (DeleteSSHKeyResponseObject, error) {
	if err := h.manager.Keys.DeleteSSHKey(ctx, callerOf(ctx).Identity, r.Params.Fingerprint); err != nil {
		return nil, err
	}
	return DeleteSSHKey204Response{}, nil
}

func sshKey(k apikeys.SSHKey) SSHKey {
	return SSHKey{Fingerprint: k.Fingerprint, Comment: k.Comment, PublicKey: k.Line}
}
