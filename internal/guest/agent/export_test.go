package agent

import "github.com/barchan-dev/barchan/internal/guest/agent/account"

// SetRoot has an agent of a test keep system files elsewhere than in the machine's own /etc.
func SetRoot(a *Agent, root string) { a.etc.root = root }

// SplitCommand is for tests.
func SplitCommand(line string) ([]string, error) { return splitCommand(line) }

// Environ is that of a process of a user.
func Environ(a *Agent, u account.User) map[string]string { return a.settings.Environ(u, nil) }
