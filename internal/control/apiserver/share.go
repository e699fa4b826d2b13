package apiserver

import (
	"k8s.io/apimachinery/pkg/runtime"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// shareParts returns what has the objects of a watch cache share parts.
func shareParts() func(runtime.Object) {
	blueprints := sandbox.NewBlueprints()
	return func(o runtime.Object) {
		if s, ok := o.(*agents.Sandbox); ok {
			blueprints.Share(&s.Spec.SandboxBlueprint)
		}
	}
}
