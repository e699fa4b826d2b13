// Package webhooks keeps the webhooks of namespaces and delivers events to them.
//
// A webhook is a Secret of type barchan.dev/webhook: its URL and its signing secret are one object, which one write makes, and
// which Kubernetes' rules for Secrets protect. One process, that with the log of events, delivers: to each webhook in order,
// each event until the receiver has answered 2xx or its attempts are used up, and again after a crash in between. How far a
// webhook is stands beside the events. Requests go to public addresses, and to those that the operator allows; redirects are
// not followed.
package webhooks
