package plan

import (
	"fmt"
	"slices"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const podSpec = "spec.podTemplate.spec"

// Fits refuses a plan that differs from that of the checkpointed sandbox. Without memory only the names of several containers
// and the sandbox's own volumes must be equal: the processes are started again.
func (p *Plan) Fits(was *Plan, memory bool) error {
	is, must := p.Containers(), was.Containers()
	switch {
	case len(is) != len(must):
		return fmt.Errorf("%s.containers: %d, the checkpoint has %d: %w", podSpec, len(is), len(must), errs.ErrInvalid)
	case memory && p.Class != was.Class:
		return differ(podSpec+".runtimeClassName", p.Class, was.Class)
	case memory && len(p.Sidecars) > 0 && p.SidecarRestart() != was.SidecarRestart(): // by the agents, in the memory
		return differ(podSpec+".restartPolicy", p.Restart, was.Restart)
	}
	for i := range is {
		if err := is[i].containerFits(&must[i], fmt.Sprintf("%s.containers[%d]", podSpec, i), memory); err != nil {
			return err
		}
	}
	return nil
}

func differ(field string, is, must any) error {
	return fmt.Errorf("%s: %v differs from the checkpoint's, %v: %w", field, is, must, errs.ErrInvalid)
}

// containerFits is Fits for the plan of one container, at a path.
func (p *Plan) containerFits(was *Plan, at string, memory bool) error {
	if p.Name != was.Name {
		return differ(at+".name", p.Name, was.Name)
	}
	if !memory {
		return volumesFit(own(lasting(p.Volumes)), own(lasting(was.Volumes)), at+".volumeMounts")
	}
	if err := volumesFit(p.Volumes, was.Volumes, at+".volumeMounts"); err != nil {
		return err
	}
	a, b := &p.Security, &was.Security
	switch {
	case !slices.Equal(p.Command, was.Command):
		return differ(at+".command", quoted(p.Command), quoted(was.Command))
	case !slices.Equal(p.Args, was.Args):
		return differ(at+".args", quoted(p.Args), quoted(was.Args))
	case p.User != was.User:
		return differ(at+".securityContext.runAsUser and runAsGroup", user(p.User), user(was.User))
	case a.NoNewPrivileges != b.NoNewPrivileges:
		return differ(at+".securityContext.allowPrivilegeEscalation", !a.NoNewPrivileges, !b.NoNewPrivileges)
	case a.ReadOnlyRoot != b.ReadOnlyRoot:
		return differ(at+".securityContext.readOnlyRootFilesystem", a.ReadOnlyRoot, b.ReadOnlyRoot)
	case !slices.Equal(sorted(a.Capabilities), sorted(b.Capabilities)):
		return differ(at+".securityContext.capabilities", sorted(a.Capabilities), sorted(b.Capabilities))
	case p.Limits.Memory != was.Limits.Memory:
		return differ(at+".resources.limits.memory", p.Limits.Memory, was.Limits.Memory)
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
