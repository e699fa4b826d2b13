package daemon

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// podObjects is the node's podsource.Objects. It reads from the API server: no copy of a Secret stays in a cache.
type podObjects struct{ d *Daemon }

func (o podObjects) Secret(ctx context.Context, namespace, name string) (*corev1.Secret, error) {
	return live(ctx, o.d, namespace, name, &corev1.Secret{})
}

func (o podObjects) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	return live(ctx, o.d, namespace, name, &corev1.ConfigMap{})
}

// live reads one object; nil if there is none.
func live[T client.Object](ctx context.Context, d *Daemon, namespace, name string, into T) (none T, err error) {
	err = d.cache.Live().Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, into)
	if err == nil {
		return into, nil
	}
	return none, client.IgnoreNotFound(err)
}
