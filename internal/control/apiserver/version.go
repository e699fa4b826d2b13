package apiserver

import (
	"runtime/debug"
	"strings"

	"k8s.io/apimachinery/pkg/version"
	"k8s.io/apiserver/pkg/util/compatibility"
	basecompatibility "k8s.io/component-base/compatibility"
)

const (
	apiserverModule = "k8s.io/apiserver"
	versionSuffix   = "+barchan"
)

// IsOurs reports whether a version is that of a Server, and not of a Kubernetes cluster.
func IsOurs(v *version.Info) bool { return strings.HasSuffix(v.GitVersion, versionSuffix) }

// effectiveVersion is the version of Kubernetes that the server reports. Upstream's build stamps it
// into the binary; here it is that of the module.
type effectiveVersion struct {
	basecompatibility.EffectiveVersion
	git string
}

func newEffectiveVersion() effectiveVersion {
	v := effectiveVersion{EffectiveVersion: compatibility.DefaultBuildEffectiveVersion()}
	v.git = "v" + v.BinaryVersion().String()
	if v.BinaryVersion().Patch() == 0 && strings.Count(v.git, ".") == 1 {
		v.git += ".0"
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if rest, is := strings.CutPrefix(m.Version, "v0."); is && m.Path == apiserverModule {
				v.git = "v1." + rest
			}
		}
	}
	v.git += versionSuffix
	return v
}

// Info implements basecompatibility.EffectiveVersion.
func (v effectiveVersion) Info() *version.Info {
	info := v.EffectiveVersion.Info()
	info.GitVersion, info.GitCommit, info.GitTreeState = v.git, "", ""
	return info
}
