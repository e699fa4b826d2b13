// Command coredns is upstream's CoreDNS with the plugins that the DNS of a Kubernetes for tests needs, and no others: all of
// them would need the SDKs of several clouds.
package main

import (
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() { coremain.Run() }
