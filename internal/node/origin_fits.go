package node

import (
	"fmt"
	"slices"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// fits refuses a sandbox that is not made as the one that was checkpointed. Without memory only its
// volumes must be: its processes are started anew.
func (o *origin) fits(p *plan) error {
	was := &o.Plan
	const spec, main = "spec.podTemplate.spec", "spec.podTemplate.spec.containers[0]"
	differ := func(field string, is, must any) error {
		return fmt.Errorf("%s: %v differs from the checkpoint's, %v: %w", field, is, must, errs.ErrInvalid)
	}
	if err := volumesFit(p.Volumes, was.Volumes, main+".volumeMounts"); err != nil || !o.memory {
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

func volumesFit(is, must []volume, field string) error {
	for i := range max(len(is), len(must)) {
		at := fmt.Sprintf("%s[%d]", field, i)
		switch {
		case i >= len(must):
			return fmt.Errorf("%s: %s is not among the checkpoint's volumes: %w", at, is[i].Target, errs.ErrInvalid)
		case i >= len(is):
			return fmt.Errorf("%s: the checkpoint has a volume at %s: %w", at, must[i].Target, errs.ErrInvalid)
		case is[i] != must[i]:
			return fmt.Errorf("%s: %s differs from the checkpoint's, %s: %w", at, is[i], must[i], errs.ErrInvalid)
		}
	}
	return nil
}

// String names what a volume is, for people.
func (v volume) String() string {
	what := "memory"
	switch {
	case v.Claim != "":
		what = "claim " + v.Claim
	case v.Scratch != "":
		what = "directory " + v.Scratch
	}
	if v.SubPath != "" {
		what += "/" + v.SubPath
	}
	if v.ReadOnly {
		what += ", read-only,"
	}
	if v.SizeLimit != 0 {
		what += fmt.Sprintf(" of %d bytes", v.SizeLimit)
	}
	return what + " at " + v.Target
}

func quoted(argv []string) string { return fmt.Sprintf("%q", argv) }

func user(u string) string {
	if u == "" {
		return "the image's user"
	}
	return u
}

// sorted is a copy in order; the order says nothing.
func sorted(names []string) []string {
	names = slices.Clone(names)
	slices.Sort(names)
	return names
}
