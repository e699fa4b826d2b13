// Command precompile compiles the seccomp filters that runsc puts on its sandboxes, their stub processes and gofers, by
// gVisor's own packages, into a copy of gVisor's source, from which it is built itself. It knows only the options that Barchan runs
// sandboxes by; runsc compiles all others when it starts, as it otherwise does for every one. It
// changes no rule: it ends with an error, and the build with it, where a filter is not, instruction
// for instruction, the one that runsc would compile.
//
//	precompile DIRECTORY    of a copy of module gvisor.dev/gvisor with our patches
package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/bpf"
	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	"gvisor.dev/gvisor/pkg/sentry/platform/systrap"
	sentry "gvisor.dev/gvisor/runsc/boot/filter/config"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter/config"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: precompile DIRECTORY")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "error: precompile filters:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	filters, err := sentryFilters()
	if err != nil {
		return fmt.Errorf("of the sentry: %w", err)
	}
	if err := register(filepath.Join(dir, "runsc/boot/filter/filter_precompiled.go"), filters); err != nil {
		return err
	}
	if filters, err = goferFilters(); err != nil {
		return fmt.Errorf("of the gofer: %w", err)
	}
	if err := register(filepath.Join(dir, "runsc/fsgofer/filter/filter_precompiled.go"), filters); err != nil {
		return err
	}
	if filters, err = stubFilters(); err != nil {
		return fmt.Errorf("of stub processes: %w", err)
	}
	return register(filepath.Join(dir, "pkg/sentry/platform/systrap/stub_filters_precompiled.go"), filters)
}

// The variables' names, of package gvisor.dev/gvisor/runsc/boot/filter/config. Should they change,
// what is compiled here has other variables than runsc gives, which check finds.
const (
	controllerFD = "controller_fd"
	selfPID      = "self_pid"
)

// sentryFilters are those of sandboxes on systrap with a network stack of their own, to whose files
// the sentry has descriptors (directfs), and no devices.
//
// PrecompiledPrograms of gVisor's package is not used here: it compiles hundreds of others too, and
// the process that it runs in stays in a rule as a constant.
func sentryFilters() ([]precompiledseccomp.Program, error) {
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		return nil, err
	}
	var filters []precompiledseccomp.Program
	for _, info := range systrap.PrecompiledSeccompInfo() {
		opt := sentry.Options{Platform: info, HostFilesystem: true}
		names := slices.Collect(maps.Keys(opt.Vars()))
		filter, err := precompiledseccomp.Precompile(opt.ConfigKey(), names, func(values precompiledseccomp.Values) *seccomp.Program {
			return sentryProgram(with(opt, values))
		})
		if err != nil {
			return nil, err
		}
		for _, fd := range []uint32{0, 3, 19, 1 << 20} {
			opt.ControllerFD = fd
			// As runsc would do in this process,
			if err := check(filter, opt.Vars(), sentryProgram(opt)); err != nil {
				return nil, err
			}
			// and in others. A sandbox's is mostly the first of its namespace.
			for _, pid := range []uint64{1, 2, 4_000_000} {
				values := opt.Vars()
				values.SetUint64(selfPID, pid)
				if err := check(filter, values, sentryProgram(with(opt, values))); err != nil {
					return nil, fmt.Errorf("process %d: %w", pid, err)
				}
			}
		}
		filters = append(filters, filter)
	}
	if len(filters) == 0 {
		return nil, errors.New("systrap has none to compile ahead of time")
	}
	return filters, nil
}

// sentryProgram has the rules in the order of gvisor.dev/gvisor/runsc/boot/filter.
func sentryProgram(opt sentry.Options) *seccomp.Program {
	allow, deny := sentry.Rules(opt)
	return &seccomp.Program{
		RuleSets: []seccomp.RuleSet{{Rules: deny}, {Rules: allow, Action: seccomp.Allow}},
		Options:  sentry.SeccompOptions(opt),
	}
}

// with gives options the values of variables that runsc knows only when it runs.
func with(opt sentry.Options, values precompiledseccomp.Values) sentry.Options {
	opt.ControllerFD = values[controllerFD]
	opt.Platform = given{opt.Platform, values}
	return opt
}

// given is a platform whose variables have these values. Those of the sentry itself are among
// them; a platform's take precedence.
type given struct {
	platform.SeccompInfo
	values precompiledseccomp.Values
}

func (g given) Variables() precompiledseccomp.Values { return g.values }

// SyscallFilters are the platform's, where systrap puts the number of this process into a rule that
// is about a process's own; it is the variable's.
func (g given) SyscallFilters(values precompiledseccomp.Values) seccomp.SyscallRules {
	rules := g.SeccompInfo.SyscallFilters(values)
	rule, ok := rules.Get(unix.SYS_RT_TGSIGQUEUEINFO).(seccomp.PerArg)
	if ok && rule[0] == seccomp.EqualTo(os.Getpid()) {
		rule[0] = seccomp.EqualTo(values.GetUint64(selfPID))
		rules.Remove(unix.SYS_RT_TGSIGQUEUEINFO)
		rules.Set(unix.SYS_RT_TGSIGQUEUEINFO, rule)
	}
	return rules
}

// goferFilters are those of gofers whose sandboxes use directfs. Whether a gofer serves any files
// itself depends on the sandbox's mounts.
func goferFilters() ([]precompiledseccomp.Program, error) {
	all, err := gofer.PrecompiledPrograms()
	if err != nil {
		return nil, err
	}
	var filters []precompiledseccomp.Program
	for _, opt := range []gofer.Options{{DirectFS: true}, {DirectFS: true, LisafsNeeded: true}} {
		key := opt.ConfigKey()
		i := slices.IndexFunc(all, func(p precompiledseccomp.Program) bool { return p.Name == key })
		if i < 0 {
			return nil, fmt.Errorf("gVisor compiles none for %s", key)
		}
		allow, deny := gofer.Rules(opt)
		want := &seccomp.Program{RuleSets: []seccomp.RuleSet{{Rules: deny}, {Rules: allow, Action: seccomp.Allow}}}
		if err := check(all[i], opt.Vars(), want); err != nil {
			return nil, err
		}
		filters = append(filters, all[i])
	}
	return filters, nil
}

// stubFilters are those of the processes whose memory is the address spaces of a sandbox's programs. Each sandbox
// has its stub at another address; the patch 0008-stub-filters.patch makes that a variable.
func stubFilters() ([]precompiledseccomp.Program, error) {
	var filters []precompiledseccomp.Program
	for _, stub := range systrap.StubFilters() {
		names := slices.Collect(maps.Keys(stub.Vars()))
		filter, err := precompiledseccomp.Precompile(stub.Name, names, stub.Program)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", stub.Name, err)
		}
		for _, address := range []uint64{0x7000_0000_1000, 0xefff_7fff_f000, 0xf000_8000_0000, 0x1_6fff_ffff_f000} {
			values := stub.Vars()
			for _, name := range slices.Sorted(maps.Keys(values)) {
				address += 0x1000 // another for each
				if long := values.Uint64VarName(name); long != "" {
					values.SetUint64(long, address)
				} else {
					values[name] = uint32(address)
				}
			}
			if err := check(filter, values, stub.Program(values)); err != nil {
				return nil, err
			}
		}
		filters = append(filters, filter)
	}
	return filters, nil
}

// check compiles a program, and returns an error unless the filter with these values is the same.
func check(filter precompiledseccomp.Program, values precompiledseccomp.Values, program *seccomp.Program) error {
	want, _, err := program.Build()
	if err != nil {
		return err
	}
	filter.Bytecode32 = slices.Clone(filter.Bytecode32) // rendering writes into it
	got, err := filter.RenderInstructions(values)
	if err != nil {
		return err
	}
	if !slices.EqualFunc(got, want, bpf.Instruction.Equal) {
		return fmt.Errorf("%s, with %v: the filter is not what runsc would compile", filter.Name, values)
	}
	return nil
}

// register adds filters to the file of a package where gVisor registers them.
func register(path string, filters []precompiledseccomp.Program) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	const made = "\tprograms := make(map[string]precompiledseccomp.Program)\n"
	before, after, ok := strings.Cut(string(text), made)
	if !ok || strings.Contains(after, made) {
		return fmt.Errorf("%s: filters are registered in another way than the one known here", path)
	}
	var b strings.Builder
	b.WriteString(before + made)
	for _, f := range filters {
		b.WriteString(f.Registration("\t", "precompiledseccomp", "programs"))
	}
	b.WriteString(after)
	return os.WriteFile(path, []byte(b.String()), 0o644)
}
