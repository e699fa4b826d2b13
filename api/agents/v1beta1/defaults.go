package v1beta1

// SetDefaults fills what the user left out. It may be called any number of times.
func SetDefaults(s *Sandbox) {
	if s.Spec.ShutdownPolicy == "" {
		s.Spec.ShutdownPolicy = ShutdownRetain
	}
	if s.Spec.OperatingMode == "" {
		s.Spec.OperatingMode = ModeRunning
	}
	if b := s.Spec.Barchan; b != nil {
		SetBarchanDefaults(b)
	}
}

// AgentSecured reports whether the sandbox's agent asks for its access token.
func (s *SandboxSpec) AgentSecured() bool {
	return s.Barchan == nil || s.Barchan.Access == nil || !s.Barchan.Access.OpenAgent
}

// SetBarchanDefaults fills what the user left out of Barchan's own part.
func SetBarchanDefaults(b *BarchanSpec) {
	if b.OnTimeout == "" {
		b.OnTimeout = TimeoutShutdown
	}
	if b.Suspend == "" {
		b.Suspend = SuspendMemory
	}
	yes := true
	if b.Access != nil && b.Access.PublicTraffic == nil {
		b.Access.PublicTraffic = &yes
	}
	if b.Network != nil && b.Network.Internet == nil {
		b.Network.Internet = &yes
	}
}
