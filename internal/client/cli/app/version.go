package app

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// VersionInfo describes the build of this program.
type VersionInfo struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
	Envd     string `json:"envd"`
}

// Version describes this program; without a version of the release, the one of the build.
func (a *App) Version() VersionInfo {
	v := VersionInfo{
		Version: a.Deps.Version, Go: runtime.Version(),
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

// Text formats the version for users.
func (v VersionInfo) Text() string {
	return fmt.Sprintf("barchan %s (%s, %s, envd %s)", v.Version, v.Go, v.Platform, v.Envd)
}
