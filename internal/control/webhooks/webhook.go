package webhooks

import (
	"cmp"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/events"
)

// annotationEnabledAt has the time of the last update that enabled a webhook.
const annotationEnabledAt = "barchan.dev/webhook-enabled-at"

// Keys of such a Secret.
const (
	keyName    = "name"
	keyURL     = "url"
	keyEvents  = "events"
	keyEnabled = "enabled"
	keySecret  = "signatureSecret"
)

// Limits of client input, in bytes.
const (
	maxName   = 128
	maxURL    = 2048
	maxSecret = 256
)

// Webhook is a receiver of events.
type Webhook struct {
	UID               types.UID
	Namespace, Object string
	Name, URL         string
	Events            []events.Type
	Enabled           bool
	// Secret signs deliveries. It is never returned by an API.
	Secret    string
	CreatedAt time.Time
	// EnabledAt is when a client last enabled it, as text; that ends the state disabled.
	EnabledAt string
}

// check names the field that is wrong.
func (w *Webhook) check(allowed []netip.Prefix) error {
	invalid := func(format string, args ...any) error { return apistatus.Refuse(errs.ErrInvalid, format, args...) }
	switch {
	case w.Name == "" || len(w.Name) > maxName:
		return invalid("name: must have from 1 to %d bytes", maxName)
	case len(w.URL) > maxURL:
		return invalid("url: has more than %d bytes", maxURL)
	case w.Secret == "" || len(w.Secret) > maxSecret:
		return invalid("signatureSecret: must have from 1 to %d bytes", maxSecret)
	case len(w.Events) == 0:
		return invalid("events: is empty, want types such as %s", events.Created)
	}
	for _, t := range w.Events {
		if !t.Known() {
			return invalid("events: %.80q is none of %s", t, joined(events.Types()))
		}
	}
	return w.checkURL(allowed)
}

func (w *Webhook) checkURL(allowed []netip.Prefix) error {
	invalid := func(format string, args ...any) error { return apistatus.Refuse(errs.ErrInvalid, format, args...) }
	u, err := url.Parse(w.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.Fragment != "" {
		return invalid("url: %q must be an http or https URL with a host, and without user and fragment", w.URL)
	}
	if ip, err := netip.ParseAddr(u.Hostname()); err == nil && !reachable(ip, allowed) {
		return invalid("url: %s is not a public address; an operator allows others with webhookAllow", ip)
	}
	return nil
}

// apply sets the fields that are given.
func (c *Change) apply(w *Webhook) {
	for from, to := range map[*string]*string{c.Name: &w.Name, c.URL: &w.URL, c.Secret: &w.Secret} {
		if from != nil {
			*to = *from
		}
	}
	if c.Enabled != nil {
		w.Enabled = *c.Enabled
	}
	if c.Events != nil {
		w.Events = nil
		for _, t := range c.Events {
			w.Events = append(w.Events, events.Type(t))
		}
	}
}

func joined(list []events.Type) string {
	texts := make([]string, len(list))
	for i, t := range list {
		texts[i] = string(t)
	}
	return strings.Join(texts, ",")
}

// write puts a webhook into its Secret.
func (w *Webhook) write(s *corev1.Secret) {
	s.Type = barchan.WebhookSecretType
	s.Data = map[string][]byte{
		keyName: []byte(w.Name), keyURL: []byte(w.URL), keySecret: []byte(w.Secret), keyEvents: []byte(joined(w.Events)), keyEnabled: []byte(strconv.FormatBool(w.Enabled)),
	}
}

// read returns the webhook of a Secret, which kubectl may have written; check finds what is wrong.
func read(s *corev1.Secret) Webhook {
	w := Webhook{
		UID: s.UID, Namespace: s.Namespace, Object: s.Name, CreatedAt: barchan.CreatedAt(s), Name: cmp.Or(string(s.Data[keyName]), s.Name),
		URL: string(s.Data[keyURL]), Secret: string(s.Data[keySecret]), EnabledAt: s.Annotations[annotationEnabledAt], Enabled: string(s.Data[keyEnabled]) != "false",
	}
	for t := range strings.SplitSeq(string(s.Data[keyEvents]), ",") {
		if t = strings.TrimSpace(t); t != "" {
			w.Events = append(w.Events, events.Type(t))
		}
	}
	return w
}

func (w *Webhook) wants(t events.Type) bool { return slices.Contains(w.Events, t) }
