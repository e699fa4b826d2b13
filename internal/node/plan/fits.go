package plan

import (
	"fmt"
	"slices"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Fits refuses a plan that differs from that of the checkpointed sandbox. Without memory only the sandbox's own volumes
// must be equal: the processes are started again.
func (p *Plan) Fits(was *Plan, memory bool) error {
	const spec, main = "spec.podTemplate.spec", "spec.podTemplate.spec.containers[0]"
	differ := func(field string, is, must any) error {
		return fmt.Errorf("%s: %v differs from the checkpoint's, %v: %w", field, is, must, errs.ErrInvalid)
	}
	if !memory {
		return volumesFit(own(Lasting(p.Volumes)), own(Lasting(was.Volumes)), main+".volumeMounts")
	}
	if err := volumesFit(p.Volumes, was.Volumes, main+".volumeMounts"); err != nil {
		return err
	}
	a, b := &p.Security, &was.Security
	switch {
	case p.Class != was.Class:
		return differ(spec+".runtimeClassName", p.Class, was.Class)
	case !slices.Equal(p.Command, was.Command):
		return differ(main+".command", quoted(p.Command), quoted(was.Command))
	case !slices.Equal(p.Args, was.Args):
		return differ(main+".args", quoted(p.Args), quoted(was.Args))
	case p.User != was.User:
		return differ(main+".securityContext.runAsUser and runAsGroup", user(p.User), user(was.User))
	case a.NoNewPrivileges != b.NoNewPrivileges:
		return differ(main+".securityContext.allowPrivilegeEscalation", !a.NoNewPrivileges, !b.NoNewPrivileges)
	case a.ReadOnlyRoot != b.ReadOnlyRoot:
		return differ(main+".securityContext.readOnlyRootFilesystem", a.ReadOnlyRoot, b.ReadOnlyRoot)
	case !slices.Equal(sorted(a.Capabilities), sorted(b.Capabilities)):
		return differ(main+".securityContext.capabilities", sorted(a.Capabilities), sorted(b.Capabilities))
	case p.Limits.Memory != was.Limits.Memory:
		return differ(main+".resources.limits.memory", p.Limits.Memory, was.Limits.Memory)
	}
	return nil
}

func quoted(argv []string) string { return fmt.Sprintf("%q", argv) }

func user(u string) string {
	if u == "" {
		return "the image's user"
	}
	return u
}

// sorted is a sorted copy; the order has no meaning.
func sorted(names []string) []string {
	names = slices.Clone(names)
	slices.Sort(names)
	return names
}
