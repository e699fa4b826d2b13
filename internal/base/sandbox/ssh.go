package sandbox

// SSHPreface begins a line that an SSH client may send before everything else: the sandbox's ID follows. The user of the login is
// then one of the sandbox, so that ssh's own USER@HOST works; SSHDefaultUser is the template's.
const (
	SSHPreface     = "BARCHAN-SANDBOX "
	SSHDefaultUser = "default"
)
