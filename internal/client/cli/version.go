package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// versionInfo describes the build of this program.
type versionInfo struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
	Envd     string `json:"envd"`
}

func (a *app) version() versionInfo {
	v := versionInfo{
		Version: a.deps.Version, Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Envd: envd.Version,
	}
	info, ok := debug.ReadBuildInfo()
	if ok && v.Version == "" {
		v.Version = info.Main.Version
	}
	if v.Version == "" {
		v.Version = "(devel)"
	}
	if ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Commit = s.Value
			}
		}
	}
	return v
}

// text formats the version for users.
func (v versionInfo) text() string {
	return fmt.Sprintf("barchan %s (%s, %s, envd %s)", v.Version, v.Go, v.Platform, v.Envd)
}

func (a *app) versionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  exactly(),
		RunE: func(*cobra.Command, []string) error {
			v := a.version()
			if a.json {
				return a.printJSON(v)
			}
			fmt.Fprintln(a.stdout, v.text())
			return nil
		},
	}
	a.jsonFlag(cmd)
	return cmd
}
