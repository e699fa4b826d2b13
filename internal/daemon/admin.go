package daemon

import (
	"net/http"

	"github.com/barchan-dev/barchan/internal/daemon/adminops"
	"github.com/barchan-dev/barchan/internal/daemon/auditing"
)

// makeAdmin makes the admin API, which answers during the boot too.
func (d *Daemon) makeAdmin() (err error) {
	d.admin, err = d.operations().API()
	return err
}

func (d *Daemon) operations() adminops.Server {
	return adminops.New(adminops.Config{
		Config: &d.cfg.Config, Version: d.cfg.Version, Started: d.started, Log: d.cfg.Log, Progress: d.progress, Gate: d.health,
		Stop:    func() { d.stop(errStopRequested) },
		Wrap:    func(h http.Handler) http.Handler { return auditing.Admin(d.audit, h) },
		Process: d.cfg.Server, Early: d.earlyParts, Ready: d.readyParts,
	})
}

func (d *Daemon) earlyParts() adminops.Early {
	early := adminops.Early{ACME: d.acme}
	if d.plain != nil {
		early.HTTP = d.plain.Addr().String()
	}
	if d.secure != nil {
		early.TLS = d.secure.Addr().String()
	}
	if d.ssh != nil {
		early.SSH = d.ssh.Addr().String()
	}
	if d.ca != nil {
		early.CAFile = d.ca.CertPath()
	}
	return early
}

func (d *Daemon) readyParts() adminops.Parts {
	parts := adminops.Parts{Machine: d.machine, Images: d.images, Apart: d.apart, Cache: d.cache, Phases: d.phases, Routes: d.routes, Peers: d.peers, Kube: d.cfg.KubeAddr, Kubeconfig: d.cfg.Kubeconfig()}
	if d.api == nil {
		parts.Kube, parts.Kubeconfig = d.rest.Host, d.cfg.APIKubeconfig
		return parts
	}
	parts.RotateSecrets = d.api.RotateSecretsKey
	if addr := d.api.Addr(); addr != nil {
		parts.Kube = addr.String()
	}
	return parts
}
