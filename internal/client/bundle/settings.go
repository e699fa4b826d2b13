package bundle

import (
	"slices"

	"github.com/barchan-dev/barchan/internal/config"
)

// shownSettings are the texts and lists that a bundle has in full: directories, names, addresses and choices. Numbers, switches,
// durations, sizes and subnets are always there. Of others the bundle has only whether they are set, so of new ones too.
var shownSettings = []string{
	"dataDir", "runDir", "cacheDir", "nodeName", "role", "privileges", "nodeSocket", "nodeSocketGroup",
	"agentImage", "runtimeClass", "clusterDomain", "leaseNamespace", "peerAddr", "peerPushAddr", "peerSeeds",
	"httpAddr", "tlsAddr", "kubeAddr", "domains", "metricsAddr", "sshAddr", "etcdPrefix",
	"containerdAddress", "containerdBinary", "containerdNamespace", "runscBinary", "runscPlatform", "runcBinary", "agentBinary",
	"bridgeName", "netnsPrefix", "nftTable", "cgroupParent", "dnsResolvers", "reachable", "webhookAllow",
	"defaultTemplate", "baseImageRef", "defaultRuntime", "pausedAddresses", "quotaCounts",
	"logLevel", "logFormat", "auditLog",
}

// setting is one setting of a bundle.
type setting struct {
	Value  any    `json:"value"`
	Source string `json:"source,omitempty"`
}

// settingsOf returns the settings by key. source returns where a value came from; nil: it is unknown.
func settingsOf(cfg *config.Config, source func(key string) config.Source) map[string]setting {
	out := map[string]setting{}
	for _, s := range cfg.Settings() {
		entry := setting{Value: s.Value()}
		if source != nil {
			entry.Source = source(s.Key).String()
		}
		if kind := s.Kind(); (kind == "string" || kind == "list") && !slices.Contains(shownSettings, s.Key) {
			entry.Value = whetherSet(entry.Value)
		}
		out[s.Key] = entry
	}
	return out
}

func whetherSet(v any) string {
	text, _ := v.(string)
	list, _ := v.([]string)
	if text == "" && len(list) == 0 {
		return ""
	}
	return redacted
}
