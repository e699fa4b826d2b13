package e2e

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What holds attempts back.
const (
	kernel   = "gVisor's kernel has no such thing"
	noDump   = "the agent is not dumpable, and root has no CAP_SYS_PTRACE"
	noAdmin  = "root has no CAP_SYS_ADMIN"
	noRaw    = "root has no CAP_NET_RAW"
	noCap    = "root lacks the capability"
	seccomp  = "the seccomp filter"
	devices  = "the cgroup's list of devices"
	masked   = "a masked or read-only path"
	own      = "a mount namespace with nothing of the host"
	firewall = "the firewall"
	patched  = "the host's kernel has the fix"
	readOnly = "the agent's directory is mounted read-only, and a running program is not writable"
)

// escapes are the attempts of testdata/escape/attempts.py: what holds each back under gVisor, and in class runc.
var escapes = map[string][2]string{
	"trace the agent":                             {noDump, noDump},
	"read the agent's memory":                     {noDump, noDump},
	"read the agent's memory by process_vm_readv": {noDump, seccomp},
	"overwrite the agent (CVE-2019-5736)":         {readOnly, readOnly},
	"release_agent of a cgroup (CVE-2022-0492)":   {noAdmin, seccomp},
	"a leaked descriptor (CVE-2024-21626)":        {kernel, own},
	"open_by_handle_at (shocker)":                 {kernel, seccomp},
	"core_pattern":                                {kernel, masked},
	"modprobe path":                               {kernel, masked},
	"binfmt_misc":                                 {kernel, own},
	"sysrq-trigger":                               {kernel, masked},
	"uevent_helper":                               {kernel, masked},
	"cgroup limits":                               {own, own},
	"kernel memory (kcore)":                       {kernel, masked},
	"kernel memory (/dev/mem)":                    {noCap, devices},
	"kernel log":                                  {kernel, own},
	"keys of the host":                            {kernel, masked},
	"symbols of the kernel":                       {kernel, noCap},
	"block devices":                               {kernel, devices},
	"/dev/kvm":                                    {noCap, devices},
	"/dev/fuse":                                   {noCap, devices},
	"a network interface of its own":              {noCap, noCap},
	"sockets of the host":                         {own, own},
	"paths of the host":                           {own, own},
	"setns":                                       {noAdmin, noDump},
	"mount tmpfs":                                 {noAdmin, seccomp},
	"mount cgroup":                                {noAdmin, seccomp},
	"mount sysfs":                                 {noAdmin, seccomp},
	"pivot_root":                                  {noAdmin, seccomp},
	"the new mount calls (CVE-2022-0185)":         {kernel, seccomp},
	"open_tree":                                   {kernel, seccomp},
	"a mount namespace by clone":                  {noAdmin, seccomp},
	"a PID namespace by clone":                    {noAdmin, seccomp},
	"a network namespace by clone":                {noAdmin, seccomp},
	"a cgroup namespace by clone":                 {noAdmin, seccomp},
	"namespaces by clone3":                        {noAdmin, seccomp},
	"a user namespace":                            {own, seccomp},
	"the directory above the root":                {own, own},
	"links to the host":                           {own, own},
	"write through a pipe (CVE-2022-0847)":        {readOnly, patched},
	"a descriptor of the agent":                   {kernel, noDump},
	"nftables (CVE-2024-1086)":                    {noCap, noCap},
	"add_key":                                     {kernel, seccomp},
	"keyctl":                                      {kernel, seccomp},
	"bpf":                                         {kernel, seccomp},
	"io_uring":                                    {kernel, seccomp},
	"userfaultfd":                                 {kernel, seccomp},
	"perf_event_open":                             {kernel, seccomp},
	"init_module":                                 {kernel, seccomp},
	"kexec_load":                                  {kernel, seccomp},
	"iopl":                                        {kernel, seccomp},
	"set the clock":                               {kernel, seccomp},
	"reboot":                                      {noCap, seccomp},
	"packet socket":                               {noRaw, noRaw},
	"raw socket":                                  {noRaw, noRaw},
	"ARP":                                         {noRaw, noRaw},
	"vsock to the hypervisor":                     {kernel, seccomp},
	"AF_ALG":                                      {kernel, seccomp},
	"ports of the host":                           {firewall, firewall},
	"ports of a neighbour":                        {firewall, firewall},
	"metadata of a cloud":                         {firewall, firewall},
	"a cloud's wire server":                       {firewall, firewall},
	"IPv6 neighbours":                             {firewall, firewall},
}

// testEscapes runs known attempts to leave a sandbox as its root. Each must be denied.
func testEscapes(t *testing.T, s *server) {
	for i, class := range []string{"gvisor", "runc"} {
		t.Run(class, func(t *testing.T) {
			s := s.in(t)
			s.apply(runtimeTemplate("escape-"+class, class, "512Mi"))
			id, ours := s.keep("escape-"+class, "hostname", "-I")
			_, theirs := s.keep("escape-"+class, "hostname", "-I")
			host := netip.PrefixFrom(netip.MustParseAddr(strings.Fields(ours)[0]), 24).Masked().Addr().Next()
			marker := filepath.Join(t.TempDir(), "escaped")
			s.must("cp", "testdata/escape/attempts.py", id+":/tmp/attempts.py")
			out := s.must("exec", "--user", "root", id, "--", "python3", "/tmp/attempts.py", host.String(), strings.Fields(theirs)[0], marker)
			tried := map[string]bool{}
			for line := range strings.Lines(out) {
				name, outcome, _ := strings.Cut(strings.TrimSpace(line), "\t")
				if _, known := escapes[name]; !known {
					t.Errorf("%s: what holds it back is not stated", line)
				}
				tried[name] = true
				if !strings.HasPrefix(outcome, "denied: ") {
					t.Errorf("%s: %s; it was held back by: %s", name, outcome, escapes[name][i])
				}
			}
			for name := range escapes {
				if !tried[name] {
					t.Errorf("%q was not tried", name)
				}
			}
			if _, err := os.Stat(marker); err == nil {
				t.Error("the host ran a program of the sandbox")
			}
		})
	}
}
