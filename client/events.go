package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/barchan-dev/barchan/client/internal/rest"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// SandboxEvent is one change of a sandbox.
type SandboxEvent struct {
	Version     string          `json:"version"`
	ID          string          `json:"id"`
	Type        string          `json:"type"`
	Data        json.RawMessage `json:"eventData"`
	BuildID     string          `json:"sandboxBuildId"`
	ExecutionID string          `json:"sandboxExecutionId"`
	SandboxID   string          `json:"sandboxId"`
	Team        string          `json:"sandboxTeamId"`
	TemplateID  string          `json:"sandboxTemplateId"`
	Timestamp   time.Time       `json:"timestamp"`
}

// EventsRequest selects events.
type EventsRequest struct {
	// SandboxID selects one sandbox, which may be gone; empty: all.
	SandboxID string
	// Types are full names; none: all.
	Types []string
	// Offset is how many to leave out, Limit, from 1 to 100, how many to return.
	Offset, Limit int
	OldestFirst   bool
}

// Events lists events.
func (c *Client) Events(ctx context.Context, r EventsRequest) ([]SandboxEvent, error) {
	q := url.Values{"types": r.Types, "limit": {strconv.Itoa(r.Limit)}, "offset": {strconv.Itoa(r.Offset)}, "orderAsc": {strconv.FormatBool(r.OldestFirst)}}
	path := "/events/sandboxes"
	if r.SandboxID != "" {
		path += "/" + url.PathEscape(r.SandboxID)
	}
	return rest.Fetch[[]SandboxEvent](ctx, &c.api, http.MethodGet, path+"?"+q.Encode(), nil)
}

// Webhook receives events.
type Webhook struct {
	ID             string     `json:"id"`
	TeamID         string     `json:"teamId"`
	Name           string     `json:"name"`
	URL            string     `json:"url"`
	Enabled        bool       `json:"enabled"`
	Events         []string   `json:"events"`
	CreatedAt      time.Time  `json:"createdAt"`
	DisabledReason string     `json:"disabledReason,omitempty"`
	LastError      string     `json:"lastError,omitempty"`
	FailingSince   *time.Time `json:"failingSince,omitempty"`
	Lost           int64      `json:"lost,omitempty"`
}

// WebhookChange has the fields of a webhook to set; nil and empty ones stay as they are.
type WebhookChange struct {
	Name            string   `json:"name,omitempty"`
	URL             string   `json:"url,omitempty"`
	Events          []string `json:"events,omitempty"`
	Enabled         *bool    `json:"enabled,omitempty"`
	SignatureSecret string   `json:"signatureSecret,omitempty"`
}

// CreateWebhook makes a webhook.
func (c *Client) CreateWebhook(ctx context.Context, w WebhookChange) (Webhook, error) {
	return rest.Fetch[Webhook](ctx, &c.api, http.MethodPost, "/events/webhooks", w)
}

// Webhooks lists all webhooks, oldest first.
func (c *Client) Webhooks(ctx context.Context) ([]Webhook, error) {
	return rest.Fetch[[]Webhook](ctx, &c.api, http.MethodGet, "/events/webhooks", nil)
}

// Webhook finds a webhook by its ID, or a name that only one has.
func (c *Client) Webhook(ctx context.Context, name string) (found Webhook, err error) {
	all, err := c.Webhooks(ctx)
	if err != nil {
		return Webhook{}, err
	}
	n := 0
	for _, w := range all {
		switch name {
		case w.ID:
			return w, nil
		case w.Name:
			found, n = w, n+1
		}
	}
	switch n {
	case 0:
		return Webhook{}, fmt.Errorf("webhook %q not found: %w", name, errs.ErrNotFound)
	case 1:
		return found, nil
	}
	return Webhook{}, fmt.Errorf("%d webhooks have the name %q; use an ID: %w", n, name, errs.ErrInvalid)
}

// UpdateWebhook changes a webhook.
func (c *Client) UpdateWebhook(ctx context.Context, id string, w WebhookChange) (Webhook, error) {
	return rest.Fetch[Webhook](ctx, &c.api, http.MethodPatch, "/events/webhooks/"+url.PathEscape(id), w)
}

// DeleteWebhook deletes a webhook.
func (c *Client) DeleteWebhook(ctx context.Context, id string) error {
	return c.Call(ctx, http.MethodDelete, "/events/webhooks/"+url.PathEscape(id), nil, nil, nil)
}
