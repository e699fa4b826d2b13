package telemetry

// Keys of log attributes, the same everywhere:
//
//	log.InfoContext(ctx, "sandbox stopped", telemetry.Sandbox, id, telemetry.Duration, time.Since(start))
const (
	Address   = "address"
	Component = "component"
	Container = "container"
	Count     = "count"
	Duration  = "duration"
	Error     = "error"
	Image     = "image"
	Kind      = "kind"
	Method    = "method"
	Name      = "name"
	Namespace = "namespace"
	Node      = "node"
	Path      = "path"
	Peer      = "peer"
	Phase     = "phase"
	PID       = "pid"
	Pool      = "pool"
	Port      = "port"
	Reason    = "reason"
	Request   = "request"
	Revision  = "revision"
	Route     = "route"
	Sandbox   = "sandbox"
	State     = "state"
	Status    = "status"
	Step      = "step"
	Template  = "template"
	UID       = "uid"
	User      = "user"
	Version   = "version"
)
