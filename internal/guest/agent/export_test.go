package agent

// SetRoot has an agent of a test keep system files elsewhere than in the machine's own /etc.
func SetRoot(a *Agent, root string) { a.etc.root = root }

// SplitCommand is for tests.
func SplitCommand(line string) ([]string, error) { return splitCommand(line) }
