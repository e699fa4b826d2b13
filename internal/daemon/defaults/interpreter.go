package defaults

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/guest/interpreter"
)

// interpreterMemory is the least memory of a sandbox of the code interpreter: its kernels take 400 MB before any code runs.
const interpreterMemory = "2Gi"

// interpreterStart bounds the start of the kernels, in seconds.
const interpreterStart = 300

// MakeInterpreter has the template of the code interpreter run an image, and creates it, and its pool in the namespace of the
// local command line, if they are missing. A template whose image is another's is left as it is.
func MakeInterpreter(ctx context.Context, cfg *config.Config, api client.Client, image string) error {
	wanted := interpreterTemplate(cfg, image)
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		have := &extensions.SandboxTemplate{}
		err := api.Get(ctx, client.ObjectKeyFromObject(wanted), have)
		if apierrors.IsNotFound(err) {
			return api.Create(ctx, wanted)
		}
		if err != nil {
			return err
		}
		boxes := have.Spec.PodTemplate.Spec.Containers
		if len(boxes) != 1 || boxes[0].Image == image || !strings.HasPrefix(boxes[0].Image, interpreter.Repository+":") {
			return nil
		}
		boxes[0].Image = image
		return api.Update(ctx, have)
	})
	if err != nil {
		return fmt.Errorf("template %s: %w", wanted.Name, err)
	}
	if cfg.PoolSize == 0 {
		return nil
	}
	if err := ensure(ctx, api, poolOf(cfg, interpreter.Template)); err != nil {
		return fmt.Errorf("pool %s: %w", wanted.Name, err)
	}
	return nil
}

// interpreterTemplate returns the template: the interpreter is the sandbox's program, and its kernels are in the memory from
// which sandboxes start.
func interpreterTemplate(cfg *config.Config, image string) *extensions.SandboxTemplate {
	t := baseTemplate(cfg)
	t.Name = interpreter.Template
	box := &t.Spec.PodTemplate.Spec.Containers[0]
	box.Image, box.Command = image, interpreter.Command()
	if memory := resource.MustParse(interpreterMemory); cfg.SandboxMemory.Cmp(memory) < 0 {
		box.Resources.Limits[corev1.ResourceMemory] = memory
	}
	t.Spec.Barchan.Sandbox = &agents.BarchanSpec{WarmUp: &agents.WarmUp{Command: interpreter.ReadyCommand(), TimeoutSeconds: interpreterStart}}
	return t
}
