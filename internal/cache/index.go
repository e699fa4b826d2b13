package cache

import (
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

const (
	indexSandboxID = "barchan.sandboxID"
	indexKeyHash   = "barchan.keyHash"
)

// index is one way to find objects of one kind.
type index struct {
	name   string
	object client.Object
	values func(client.Object) []string
}

func indexes() []index {
	return []index{
		{indexSandboxID, &agents.Sandbox{}, func(o client.Object) []string { return []string{string(sandbox.IDOf(o.GetUID()))} }},
		{indexKeyHash, &barchan.APIKey{}, func(o client.Object) []string {
			if k, ok := o.(*barchan.APIKey); ok {
				return []string{k.Spec.SHA256}
			}
			return nil
		}},
	}
}
