package adminapi

import (
	"context"
	"net/http"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// Peers are the replicas and their gossip keys; all of it may answer errs.ErrUnavailable during
// the boot, and errs.ErrNotFound where there are to be no peers. Keys are changed here alone.
type Peers interface {
	Peers(ctx context.Context) ([]adminclient.Replica, error)
	// AddKey makes a key where there is none; the answer has the secret then.
	AddKey(ctx context.Context, key string) (adminclient.PeerKey, error)
	UseKey(ctx context.Context, id string) error
	RemoveKey(ctx context.Context, id string) error
}

// handlePeers adds the routes of peers, if there is something behind them.
func (a *API) handlePeers(mux *http.ServeMux) {
	p := a.cfg.Peers
	if p == nil {
		return
	}
	mux.HandleFunc("GET "+adminclient.PathPeers, func(w http.ResponseWriter, r *http.Request) {
		list, err := p.Peers(r.Context())
		a.answer(w, r, orEmpty(list), err)
	})
	mux.HandleFunc("POST "+adminclient.PathPeerKeys, func(w http.ResponseWriter, r *http.Request) {
		var req adminclient.PeerKey
		if err := decode(w, r, &req); err != nil {
			a.refuse(w, r, err)
			return
		}
		key, err := p.AddKey(r.Context(), req.Key)
		a.answer(w, r, key, err)
	})
	mux.HandleFunc("POST "+adminclient.PathPeerKeys+"/{id}/use", a.changeKey(p.UseKey))
	mux.HandleFunc("DELETE "+adminclient.PathPeerKeys+"/{id}", a.changeKey(p.RemoveKey))
}

func (a *API) changeKey(change func(ctx context.Context, id string) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := change(r.Context(), r.PathValue("id")); err != nil {
			a.refuse(w, r, err)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}
}
