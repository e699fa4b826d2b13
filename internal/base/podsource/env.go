package podsource

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// Variables are the values that the environment of a container refers to.
type Variables struct {
	// From has those of envFrom, by name. A later source wins.
	From map[string]string
	// Keys has those of keys, by the index in env. An optional one that is missing has none.
	Keys map[int]string
}

// Resolve reads the values of an environment. A *Missing is the first that is not there and not optional.
func Resolve(ctx context.Context, objects Objects, namespace string, env []corev1.EnvVar, from []corev1.EnvFromSource) (v Variables, err error) {
	r := reader{Objects: objects, namespace: namespace, reason: ReasonConfig}
	v.From, v.Keys = map[string]string{}, map[int]string{}
	for i := range from {
		data, err := r.source(ctx, &from[i])
		if err != nil {
			return v, err
		}
		for key, value := range data {
			if name := from[i].Prefix + key; validName(name) {
				v.From[name] = value
			}
		}
	}
	for i := range env {
		value, found, err := r.key(ctx, env[i].ValueFrom)
		if err != nil {
			return v, err
		}
		if found {
			v.Keys[i] = value
		}
	}
	return v, nil
}

// reader reads objects of a namespace. Missing ones are errors with its reason.
type reader struct {
	Objects
	namespace, reason string
}

func (r reader) source(ctx context.Context, from *corev1.EnvFromSource) (map[string]string, error) {
	switch {
	case from.SecretRef != nil:
		data, err := r.secret(ctx, from.SecretRef.Name, ptr.Deref(from.SecretRef.Optional, false))
		return texts(data), err
	case from.ConfigMapRef != nil:
		c, err := r.configMap(ctx, from.ConfigMapRef.Name, ptr.Deref(from.ConfigMapRef.Optional, false))
		if c == nil {
			return nil, err
		}
		return c.Data, err
	}
	return nil, nil
}

// key reads the value of a variable. found is false for one that refers to no object, or to an optional one that is
// missing.
func (r reader) key(ctx context.Context, from *corev1.EnvVarSource) (value string, found bool, err error) {
	switch {
	case from == nil:
		return "", false, nil
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		optional := ptr.Deref(ref.Optional, false)
		data, err := r.secret(ctx, ref.Name, optional)
		if err != nil || data == nil && optional {
			return "", false, err
		}
		b, found := data[ref.Key]
		if !found && !optional {
			err = r.missing("couldn't find key %v in Secret %v/%v", ref.Key, r.namespace, ref.Name)
		}
		return string(b), found, err
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		optional := ptr.Deref(ref.Optional, false)
		c, err := r.configMap(ctx, ref.Name, optional)
		if err != nil || c == nil {
			return "", false, err
		}
		value, found := c.Data[ref.Key]
		if !found && !optional {
			err = r.missing("couldn't find key %v in ConfigMap %v/%v", ref.Key, r.namespace, ref.Name)
		}
		return value, found, err
	}
	return "", false, nil
}

func (r reader) secret(ctx context.Context, name string, optional bool) (map[string][]byte, error) {
	s, err := r.Secret(ctx, r.namespace, name)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read Secret %s/%s: %w", r.namespace, name, err)
	case s != nil:
		return s.Data, nil
	case optional:
		return nil, nil
	}
	return nil, r.missing("secret %q not found", name)
}

func (r reader) configMap(ctx context.Context, name string, optional bool) (*corev1.ConfigMap, error) {
	c, err := r.ConfigMap(ctx, r.namespace, name)
	switch {
	case err != nil:
		return nil, fmt.Errorf("read ConfigMap %s/%s: %w", r.namespace, name, err)
	case c == nil && !optional:
		return nil, r.missing("configmap %q not found", name)
	}
	return c, nil
}

func (r reader) missing(format string, args ...any) error {
	return &Missing{Reason: r.reason, Message: fmt.Sprintf(format, args...)}
}

func texts(data map[string][]byte) map[string]string {
	all := map[string]string{}
	for key, value := range data {
		all[key] = string(value)
	}
	return all
}
