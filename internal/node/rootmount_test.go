package node

import (
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// The host gives no rights to what is in a sandbox's root; in a sandbox, programs that change their user work as ever.
func TestRootMount(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	for _, c := range []string{"gvisor", "runc"} {
		s := object(class(c), func(s *agents.Sandbox) {
			container(s).SecurityContext = &corev1.SecurityContext{AllowPrivilegeEscalation: new(true)}
		})
		ensure(t, n, s)
		var st unix.Statfs_t
		must(t, unix.Statfs(filepath.Join(n.host.Dir(string(sandbox.IDOf(s.UID))), "rootfs"), &st))
		if st.Flags&unix.ST_NODEV == 0 || (st.Flags&unix.ST_NOSUID != 0) != (c == "gvisor") {
			t.Errorf("%s: root is mounted with flags %#x", c, st.Flags)
		}
		// It asks for a password only if its user has changed.
		const script = "cd /home && /bin/busybox cp /bin/busybox su && /bin/busybox chmod 4755 su && " +
			"/bin/busybox start-stop-daemon -S -c user -x ./su -- -c true </dev/null"
		if out, _ := run(t, n, s, script); !strings.Contains(out, "assword") || strings.Contains(out, "must be suid") {
			t.Errorf("%s: a setuid program says %q", c, out)
		}
	}
}
