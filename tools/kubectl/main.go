// Command kubectl is upstream's kubectl, built from its Go module so that tests
// and users without one need no download. It adds nothing.
package main

import (
	"os"

	_ "k8s.io/client-go/plugin/pkg/client/auth" // the credential plugins that a kubeconfig may name
	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
)

func main() {
	os.Exit(cli.Run(cmd.NewDefaultKubectlCommand()))
}
