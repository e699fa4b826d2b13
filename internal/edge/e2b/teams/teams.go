package teams

import (
	"context"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// Handlers serves what belongs to a team: its keys and how it reaches sandboxes.
type Handlers struct {
	Manager *manager.Manager
	// SSH is how clients reach sandboxes over SSH; nil: they cannot.
	SSH *api.SSHAccess
}

// ListTeams is GET /teams: exactly the caller's own namespace.
func (h *Handlers) ListTeams(ctx context.Context, _ api.ListTeamsRequestObject) (api.ListTeamsResponseObject, error) {
	who := request.CallerOf(ctx)
	return api.ListTeams200JSONResponse{{TeamID: who.Namespace, Name: who.Namespace, APIKey: who.Secret, IsDefault: true}}, nil
}

// ListAPIKeys is GET /api-keys.
func (h *Handlers) ListAPIKeys(ctx context.Context, _ api.ListAPIKeysRequestObject) (api.ListAPIKeysResponseObject, error) {
	keys, err := h.Manager.Keys.List(ctx, request.CallerOf(ctx).Namespace)
	if err != nil {
		return nil, err
	}
	out := make(api.ListAPIKeys200JSONResponse, len(keys))
	for i, k := range keys {
		out[i] = api.APIKey{ID: k.ID, Name: k.Description, Mask: keyMask(k), CreatedAt: k.CreatedAt, ExpiresAt: k.ExpiresAt, Scope: api.KeyScope(k.Scope), LastUsed: k.LastUsedAt}
	}
	return out, nil
}

// CreateAPIKey is POST /api-keys.
func (h *Handlers) CreateAPIKey(ctx context.Context, r api.CreateAPIKeyRequestObject) (api.CreateAPIKeyResponseObject, error) {
	key := apikeys.New{Description: r.Body.Name, ExpiresAt: r.Body.ExpiresAt}
	if r.Body.Scope != nil {
		key.Scope = barchan.KeyScope(*r.Body.Scope)
	}
	k, secret, err := h.Manager.Keys.Create(ctx, request.CallerOf(ctx).Identity, key)
	if err != nil {
		return nil, err
	}
	return api.CreateAPIKey201JSONResponse{ID: k.ID, Key: secret, Name: k.Description, Mask: keyMask(k), CreatedAt: k.CreatedAt, ExpiresAt: k.ExpiresAt, Scope: api.KeyScope(k.Scope)}, nil
}

// DeleteAPIKey is DELETE /api-keys/{apiKeyID}.
func (h *Handlers) DeleteAPIKey(ctx context.Context, r api.DeleteAPIKeyRequestObject) (api.DeleteAPIKeyResponseObject, error) {
	if err := h.Manager.Keys.Delete(ctx, request.CallerOf(ctx).Identity, r.APIKeyID); err != nil {
		return nil, err
	}
	return api.DeleteAPIKey204Response{}, nil
}

// RenameAPIKey is PATCH /api-keys/{apiKeyID}.
func (h *Handlers) RenameAPIKey(ctx context.Context, r api.RenameAPIKeyRequestObject) (api.RenameAPIKeyResponseObject, error) {
	if err := h.Manager.Keys.Rename(ctx, request.CallerOf(ctx).Identity, r.APIKeyID, r.Body.Name); err != nil {
		return nil, err
	}
	return api.RenameAPIKey204Response{}, nil
}

// CreateAccessToken is POST /access-tokens. E2B's access tokens are of a person with several teams; here each is of one, as API
// keys are.
func (h *Handlers) CreateAccessToken(ctx context.Context, r api.CreateAccessTokenRequestObject) (api.CreateAccessTokenResponseObject, error) {
	k, secret, err := h.Manager.Keys.Create(ctx, request.CallerOf(ctx).Identity, apikeys.New{Description: r.Body.Name})
	if err != nil {
		return nil, err
	}
	return api.CreateAccessToken201JSONResponse{ID: k.ID, Name: k.Description, Token: secret, Mask: keyMask(k), CreatedAt: k.CreatedAt}, nil
}

// DeleteAccessToken is DELETE /access-tokens/{accessTokenID}.
func (h *Handlers) DeleteAccessToken(ctx context.Context, r api.DeleteAccessTokenRequestObject) (api.DeleteAccessTokenResponseObject, error) {
	if err := h.Manager.Keys.Delete(ctx, request.CallerOf(ctx).Identity, r.AccessTokenID); err != nil {
		return nil, err
	}
	return api.DeleteAccessToken204Response{}, nil
}

func keyMask(k apikeys.Key) api.KeyMask {
	shown := ""
	if len(k.Prefix) > len(barchan.KeyPrefix) {
		shown = k.Prefix[len(barchan.KeyPrefix):]
	}
	return api.KeyMask{Prefix: barchan.KeyPrefix, ValueLength: barchan.KeyDigits, MaskedValuePrefix: shown}
}
