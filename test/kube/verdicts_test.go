package kube

import (
	"cmp"
	"strings"
)

// verdict is an object, or a change of one, and the field over which it is refused; empty if
// it is taken. The object is what is changed of the valid one of its kind.
type verdict struct {
	kind, name     string
	object, change string // YAML
	field          string
	// real is the field that Kubernetes names, where a schema cannot point as closely as code:
	// the one that holds field.
	real string
}

func (v verdict) realField() string { return cmp.Or(v.real, v.field) }

func verdicts() []verdict {
	all := []verdict{}
	for _, of := range [][]verdict{
		metadataVerdicts(), sandboxVerdicts(), originVerdicts(), egressVerdicts(), templateVerdicts(), poolVerdicts(), autoscaleVerdicts(),
		claimVerdicts(), checkpointVerdicts(), keyVerdicts(), revisionVerdicts(), buildVerdicts(),
	} {
		all = append(all, of...)
	}
	return append(all, blueprintVerdicts("Sandbox")...)
}

func metadataVerdicts() []verdict {
	return []verdict{
		{kind: "Sandbox", name: "name", object: "metadata: {name: A}", field: "metadata.name"},
		{kind: "SandboxClaim", name: "label", object: "metadata: {labels: {a b: c}}", field: "metadata.labels"},
		{kind: "SandboxClaim", name: "label's value", object: "metadata: {labels: {a: b c}}", field: "metadata.labels"},
		{kind: "SandboxWarmPool", name: "annotation", object: "metadata: {annotations: {a b: c}}", field: "metadata.annotations"},
		{kind: "SandboxWarmPool", name: "finalizer", object: "metadata: {finalizers: [a b]}", field: "metadata.finalizers"},
		{kind: "SandboxWarmPool", name: "good metadata", object: "metadata: {labels: {a: b}, annotations: {a/b: c d}, finalizers: [barchan.dev/node]}"},
		{kind: "SandboxWarmPool", name: "labels change", object: "{}", change: "metadata: {labels: {a: b}}"},
		{kind: "SandboxWarmPool", name: "bad labels change", object: "{}", change: "metadata: {labels: {a: b c}}", field: "metadata.labels"},
		{kind: "SandboxWarmPool", name: "unknown field", object: "spec: {surprise: 1}"},
		{kind: "SandboxWarmPool", name: "no spec", object: "spec: null", field: "spec.sandboxTemplateRef.name", real: "spec"},
	}
}

// blueprintVerdicts are what Sandbox and SandboxTemplate share.
func blueprintVerdicts(kind string) []verdict {
	pod := func(p string) string { return "spec: {podTemplate: {spec: {" + p + "}}}" }
	long := strings.Repeat("a", 64)
	return []verdict{
		{kind: kind, name: "as it is", object: "{}"},
		{kind: kind, name: "no containers", object: pod("containers: []"), field: "spec.podTemplate.spec.containers"},
		{kind: kind, name: "containers left out", object: pod("containers: null"), field: "spec.podTemplate.spec.containers"},
		{kind: kind, name: "container without a name", object: pod("containers: [{image: x}]"), field: "spec.podTemplate.spec.containers[0].name"},
		{kind: kind, name: "container's empty name", object: pod("containers: [{name: '', image: x}]"), field: "spec.podTemplate.spec.containers[0].name"},
		{kind: kind, name: "container's name", object: pod("containers: [{name: A_b, image: x}]"), field: "spec.podTemplate.spec.containers[0].name"},
		{kind: kind, name: "container's long name", object: pod("containers: [{name: " + long + ", image: x}]"), field: "spec.podTemplate.spec.containers[0].name"},
		{
			kind: kind, name: "containers of one name", object: pod("containers: [{name: a, image: x}, {name: a, image: x}]"),
			field: "spec.podTemplate.spec.containers[1].name", real: "spec.podTemplate.spec.containers[1]",
		},
		{kind: kind, name: "defaults of a container", object: pod("containers: [{name: a, image: x, ports: [{containerPort: 80}], livenessProbe: {grpc: {port: 1}}, env: [{name: E, valueFrom: {fileKeyRef: {volumeName: v, path: p, key: k}}}]}]")},
		{kind: kind, name: "wrong type", object: pod("containers: [{name: a, image: x, tty: 'yes'}]"), field: "spec.podTemplate.spec.containers[0].tty"},
		{kind: kind, name: "two volumes", object: "spec: {volumeClaimTemplates: [{metadata: {name: a}, spec: {}}, {metadata: {name: b}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}]}"},
		{kind: kind, name: "volume without a name", object: "spec: {volumeClaimTemplates: [{spec: {}}]}", field: "spec.volumeClaimTemplates[0].metadata.name", real: "spec.volumeClaimTemplates[0].metadata"},
		{kind: kind, name: "volume's empty name", object: "spec: {volumeClaimTemplates: [{metadata: {name: ''}, spec: {}}]}", field: "spec.volumeClaimTemplates[0].metadata.name"},
		{kind: kind, name: "volume's name", object: "spec: {volumeClaimTemplates: [{metadata: {name: A_b}, spec: {}}]}", field: "spec.volumeClaimTemplates[0].metadata.name"},
		{kind: kind, name: "volume's long name", object: "spec: {volumeClaimTemplates: [{metadata: {name: " + long + "}, spec: {}}]}", field: "spec.volumeClaimTemplates[0].metadata.name"},
		{
			kind: kind, name: "volumes of one name", object: "spec: {volumeClaimTemplates: [{metadata: {name: a}, spec: {}}, {metadata: {name: a}, spec: {}}]}",
			field: "spec.volumeClaimTemplates[1].metadata.name", real: "spec.volumeClaimTemplates",
		},
		{kind: kind, name: "too many volumes", object: "spec: {volumeClaimTemplates: [" + repeat(33, "{metadata: {name: v%}, spec: {}}") + "]}", field: "spec.volumeClaimTemplates"},
		{kind: kind, name: "as many volumes as may be", object: "spec: {volumeClaimTemplates: [" + repeat(32, "{metadata: {name: v%}, spec: {}}") + "]}"},
	}
}

// repeat lists a text n times, % being the number.
func repeat(n int, text string) string {
	all := make([]string, n)
	for i := range all {
		all[i] = strings.ReplaceAll(text, "%", strings.Repeat("x", i+1))
	}
	return strings.Join(all, ", ")
}

func sandboxVerdicts() []verdict {
	return []verdict{
		{kind: "Sandbox", name: "all set", object: "spec: {shutdownTime: '2030-01-02T03:04:05Z', shutdownPolicy: Delete, operatingMode: Suspended, service: true}"},
		{kind: "Sandbox", name: "shutdown policy", object: "spec: {shutdownPolicy: Sometimes}", field: "spec.shutdownPolicy"},
		{kind: "Sandbox", name: "operating mode", object: "spec: {operatingMode: Idle}", field: "spec.operatingMode"},
		{kind: "Sandbox", name: "operating mode later", object: "{}", change: "spec: {operatingMode: Idle}", field: "spec.operatingMode"},
		{kind: "Sandbox", name: "suspended later", object: "{}", change: "spec: {operatingMode: Suspended}"},
		{kind: "Sandbox", name: "volumes do not come later", object: "{}", change: "spec: {volumeClaimTemplates: [{metadata: {name: v}, spec: {}}]}", field: "spec.volumeClaimTemplates"},
		{kind: "Sandbox", name: "volumes do not go", object: "spec: {volumeClaimTemplates: [{metadata: {name: v}, spec: {}}]}", change: "spec: {volumeClaimTemplates: null}", field: "spec.volumeClaimTemplates"},
		{kind: "Sandbox", name: "volumes do not change", object: "spec: {volumeClaimTemplates: [{metadata: {name: v}, spec: {}}]}", change: "spec: {volumeClaimTemplates: [{metadata: {name: w}, spec: {}}]}", field: "spec.volumeClaimTemplates"},
		{kind: "Sandbox", name: "an empty list of volumes is none", object: "{}", change: "spec: {volumeClaimTemplates: [], service: true}"},
		{kind: "Sandbox", name: "beside the volumes", object: "spec: {volumeClaimTemplates: [{metadata: {name: v}, spec: {}}]}", change: "spec: {shutdownPolicy: Delete}"},
		{kind: "Sandbox", name: "empty addition", object: "spec: {barchan: {}}"},
		{kind: "Sandbox", name: "empty parts of the addition", object: "spec: {barchan: {wake: {}, access: {}, network: {}}}"},
		{kind: "Sandbox", name: "addition", object: "spec: {barchan: {metadata: {'any key': v}, onTimeout: Pause, suspend: Files, wake: {onTraffic: true, timeoutSeconds: 60}, access: {openAgent: true, publicTraffic: false, maskRequestHost: 'localhost:${PORT}'}}}"},
		{kind: "Sandbox", name: "at the timeout", object: "spec: {barchan: {onTimeout: Explode}}", field: "spec.barchan.onTimeout"},
		{kind: "Sandbox", name: "suspend", object: "spec: {barchan: {suspend: Nothing}}", field: "spec.barchan.suspend"},
		{kind: "Sandbox", name: "negative timeout", object: "spec: {barchan: {wake: {timeoutSeconds: -1}}}", field: "spec.barchan.wake.timeoutSeconds"},
		{kind: "Sandbox", name: "no timeout of its own", object: "spec: {barchan: {wake: {timeoutSeconds: 0}}}"},
		{kind: "Sandbox", name: "idle", object: "spec: {barchan: {idle: {afterSeconds: 60}}}"},
		{kind: "Sandbox", name: "idle, then gone", object: "spec: {barchan: {idle: {afterSeconds: 60, action: Shutdown}}}"},
		{kind: "Sandbox", name: "idle at once", object: "spec: {barchan: {idle: {afterSeconds: 0}}}", field: "spec.barchan.idle.afterSeconds"},
		{kind: "Sandbox", name: "idle, then what", object: "spec: {barchan: {idle: {afterSeconds: 60, action: Nap}}}", field: "spec.barchan.idle.action"},
		{kind: "Sandbox", name: "rate", object: "spec: {barchan: {access: {requestsPerSecond: 100}}}"},
		{kind: "Sandbox", name: "negative rate", object: "spec: {barchan: {access: {requestsPerSecond: -1}}}", field: "spec.barchan.access.requestsPerSecond"},
		{kind: "Sandbox", name: "resume", object: "spec: {barchan: {resume: Files}}"},
		{kind: "Sandbox", name: "resume what", object: "spec: {barchan: {resume: Nothing}}", field: "spec.barchan.resume"},
		{kind: "Sandbox", name: "resume later", object: "{}", change: "spec: {barchan: {resume: Files}}"},
		{kind: "Sandbox", name: "secrets", object: "spec: {barchan: {fork: {secrets: Allow}}}"},
		{kind: "Sandbox", name: "no secrets set", object: "spec: {barchan: {fork: {}}}"},
		{kind: "Sandbox", name: "secrets for whom", object: "spec: {barchan: {fork: {secrets: Maybe}}}", field: "spec.barchan.fork.secrets"},
		{kind: "Sandbox", name: "huge timeout", object: "spec: {barchan: {wake: {timeoutSeconds: 3000000000}}}", field: "spec.barchan.wake.timeoutSeconds"},
	}
}

func originVerdicts() []verdict {
	restore := func(r string) string { return "spec: {barchan: {restore: {" + r + "}}}" }
	warmUp := func(w string) string { return "spec: {barchan: {warmUp: {" + w + "}}}" }
	of := func(s string) string { return "spec: {barchan: {sandbox: {" + s + "}}}" }
	return []verdict{
		{kind: "Sandbox", name: "restore", object: restore("checkpointName: a.b-c")},
		{kind: "Sandbox", name: "restore files", object: restore("checkpointName: a, filesOnly: true")},
		{kind: "Sandbox", name: "restore from what", object: restore(""), field: "spec.barchan.restore.checkpointName"},
		{kind: "Sandbox", name: "restore from an empty name", object: restore("checkpointName: ''"), field: "spec.barchan.restore.checkpointName"},
		{kind: "Sandbox", name: "restore from a bad name", object: restore("checkpointName: A_b"), field: "spec.barchan.restore.checkpointName"},
		{kind: "Sandbox", name: "restore from a name too long", object: restore("checkpointName: " + strings.Repeat("a", 254)), field: "spec.barchan.restore.checkpointName"},
		{kind: "Sandbox", name: "restore later", object: "{}", change: restore("checkpointName: a"), field: "spec.barchan.restore", real: "spec.barchan"},
		{kind: "Sandbox", name: "restore later, beside others", object: "spec: {barchan: {}}", change: restore("checkpointName: a"), field: "spec.barchan.restore", real: "spec.barchan"},
		{kind: "Sandbox", name: "restore from another", object: restore("checkpointName: a"), change: restore("checkpointName: b"), field: "spec.barchan.restore", real: "spec.barchan"},
		{kind: "Sandbox", name: "restore goes", object: restore("checkpointName: a"), change: "spec: {barchan: {restore: null}}", field: "spec.barchan.restore", real: "spec.barchan"},
		{kind: "Sandbox", name: "restore goes with all else", object: restore("checkpointName: a"), change: "spec: {barchan: null}", field: "spec.barchan.restore", real: "spec.barchan"},
		{kind: "Sandbox", name: "restore of more", object: restore("checkpointName: a"), change: restore("filesOnly: true"), field: "spec.barchan.restore", real: "spec.barchan"},
		{kind: "Sandbox", name: "beside restore", object: restore("checkpointName: a"), change: "spec: {barchan: {resume: Files}}"},
		{kind: "Sandbox", name: "warm-up", object: warmUp("command: [a, '', b]")},
		{kind: "Sandbox", name: "warm-up with a time", object: warmUp("command: [a], timeoutSeconds: 3600")},
		{kind: "Sandbox", name: "warm-up without a program", object: warmUp("command: ['', a]"), field: "spec.barchan.warmUp.command[0]", real: "spec.barchan.warmUp.command"},
		{kind: "Sandbox", name: "warm-up of nothing", object: warmUp("command: []"), field: "spec.barchan.warmUp.command"},
		{kind: "Sandbox", name: "warm-up left out", object: warmUp("timeoutSeconds: 5"), field: "spec.barchan.warmUp.command"},
		{kind: "Sandbox", name: "warm-up of many words", object: warmUp("command: [" + repeat(257, "a") + "]"), field: "spec.barchan.warmUp.command"},
		{kind: "Sandbox", name: "warm-up of as many as may be", object: warmUp("command: [" + repeat(256, "a") + "]")},
		{kind: "Sandbox", name: "user with a group", object: "spec: {barchan: {defaultUser: 'app:staff'}}"},
		{kind: "Sandbox", name: "user by number", object: "spec: {barchan: {defaultUser: '1234:60'}}"},
		{kind: "Sandbox", name: "group without a user", object: "spec: {barchan: {defaultUser: ':staff'}}", field: "spec.barchan.defaultUser"},
		{kind: "Sandbox", name: "user with two groups", object: "spec: {barchan: {defaultUser: 'a:b:c'}}", field: "spec.barchan.defaultUser"},
		{kind: "Sandbox", name: "warm-up of no time", object: warmUp("command: [a], timeoutSeconds: -1"), field: "spec.barchan.warmUp.timeoutSeconds"},
		{kind: "Sandbox", name: "warm-up of hours", object: warmUp("command: [a], timeoutSeconds: 3601"), field: "spec.barchan.warmUp.timeoutSeconds"},
		{kind: "Sandbox", name: "both", object: "spec: {barchan: {restore: {checkpointName: a}, warmUp: {command: [a]}}}"},
		{kind: "SandboxTemplate", name: "sandboxes' origin", object: of("restore: {checkpointName: a}")},
		{kind: "SandboxTemplate", name: "sandboxes' origin changes", object: of("restore: {checkpointName: a}"), change: of("restore: {checkpointName: b}")},
		{kind: "SandboxTemplate", name: "sandboxes' bad origin", object: of("restore: {checkpointName: A}"), field: "spec.barchan.sandbox.restore.checkpointName"},
		{kind: "SandboxTemplate", name: "sandboxes' warm-up", object: of("warmUp: {command: [a]}")},
		{kind: "SandboxTemplate", name: "a warm-up that is never run", object: of("restore: {checkpointName: a}, warmUp: {command: [a]}"), field: "spec.barchan.sandbox.warmUp"},
		{kind: "SandboxTemplate", name: "a warm-up over files", object: of("restore: {checkpointName: a, filesOnly: true}, warmUp: {command: [a]}")},
		{kind: "SandboxTemplate", name: "a warm-up that is never run, later", object: of("warmUp: {command: [a]}"), change: of("restore: {checkpointName: a}"), field: "spec.barchan.sandbox.warmUp"},
	}
}

func egressVerdicts() []verdict {
	network := func(n string) string { return "spec: {barchan: {network: {" + n + "}}}" }
	return []verdict{
		{kind: "Sandbox", name: "addresses", object: network("allowOut: [1.2.3.4, 10.0.0.0/8, '2001:db8::1', '2001:db8::/32'], denyOut: [0.0.0.0/0, 1.1.1.1]")},
		{kind: "Sandbox", name: "domains", object: network("allowOut: [example.com, '*.example.com', 1.1.1.1], denyOut: [0.0.0.0/0]")},
		{kind: "Sandbox", name: "domains without the internet", object: network("allowOut: [example.com], internet: false")},
		{kind: "Sandbox", name: "domains that allow nothing more", object: network("allowOut: [1.1.1.1, example.com]"), field: "spec.barchan.network.allowOut[1]", real: "spec.barchan.network.allowOut"},
		{kind: "Sandbox", name: "denied too little", object: network("allowOut: [example.com], denyOut: [10.0.0.0/8]"), field: "spec.barchan.network.allowOut[0]", real: "spec.barchan.network.allowOut"},
		{kind: "Sandbox", name: "domain", object: network("allowOut: ['a b'], denyOut: [0.0.0.0/0]"), field: "spec.barchan.network.allowOut[0]"},
		{kind: "Sandbox", name: "star within a domain", object: network("allowOut: ['a.*.b'], denyOut: [0.0.0.0/0]"), field: "spec.barchan.network.allowOut[0]"},
		{kind: "Sandbox", name: "upper case", object: network("allowOut: [Example.com], denyOut: [0.0.0.0/0]"), field: "spec.barchan.network.allowOut[0]"},
		{kind: "Sandbox", name: "long domain", object: network("allowOut: [" + strings.Repeat("a.", 127) + "], denyOut: [0.0.0.0/0]"), field: "spec.barchan.network.allowOut[0]"},
		{kind: "Sandbox", name: "empty entry", object: network("allowOut: [''], denyOut: [0.0.0.0/0]"), field: "spec.barchan.network.allowOut[0]"},
		{kind: "Sandbox", name: "denied domain", object: network("denyOut: [example.com]"), field: "spec.barchan.network.denyOut[0]"},
		{kind: "Sandbox", name: "prefix", object: network("denyOut: [1.1.1.1, 10.0.0.0/33]"), field: "spec.barchan.network.denyOut[1]"},
		{kind: "Sandbox", name: "zone", object: network("denyOut: ['fe80::1%eth0']"), field: "spec.barchan.network.denyOut[0]"},
		{kind: "Sandbox", name: "mapped address", object: network("denyOut: ['::ffff:1.2.3.4']"), field: "spec.barchan.network.denyOut[0]"},
		{kind: "Sandbox", name: "many entries", object: network("denyOut: [" + repeat(1001, "1.1.1.1") + "]"), field: "spec.barchan.network.denyOut"},
		{kind: "Sandbox", name: "network policy", object: "spec: {barchan: {networkPolicy: {egress: [{to: [{podSelector: {}}, {ipBlock: {cidr: 0.0.0.0/0, except: [10.0.0.0/8]}}], ports: [{protocol: UDP, port: 53}, {port: 80, endPort: 90}]}]}}}"},
		{kind: "Sandbox", name: "as many entries as may be", object: network("denyOut: [" + repeat(1000, "1.1.1.1") + "]")},
	}
}

func templateVerdicts() []verdict {
	return append(blueprintVerdicts("SandboxTemplate"), []verdict{
		{kind: "SandboxTemplate", name: "all set", object: "spec: {networkPolicy: {ingress: [], egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8}}], ports: [{port: 80}]}]}, networkPolicyManagement: Unmanaged, envVarsInjectionPolicy: Allowed, volumeClaimTemplatesPolicy: Overrides, barchan: {aliases: [a, b], public: true, sandbox: {wake: {}, network: {}}}}"},
		{kind: "SandboxTemplate", name: "network policy management", object: "spec: {networkPolicyManagement: Mine}", field: "spec.networkPolicyManagement"},
		{kind: "SandboxTemplate", name: "environment policy", object: "spec: {envVarsInjectionPolicy: Maybe}", field: "spec.envVarsInjectionPolicy"},
		{kind: "SandboxTemplate", name: "environment policy later", object: "{}", change: "spec: {envVarsInjectionPolicy: Maybe}", field: "spec.envVarsInjectionPolicy"},
		{kind: "SandboxTemplate", name: "volume policy", object: "spec: {volumeClaimTemplatesPolicy: Maybe}", field: "spec.volumeClaimTemplatesPolicy"},
		{kind: "SandboxTemplate", name: "aliases", object: "spec: {barchan: {aliases: [a, b, a]}}", field: "spec.barchan.aliases[2]"},
		{kind: "SandboxTemplate", name: "sandboxes' addition", object: "spec: {barchan: {sandbox: {suspend: Nothing}}}", field: "spec.barchan.sandbox.suspend"},
		{kind: "SandboxTemplate", name: "sandboxes' network", object: "spec: {barchan: {sandbox: {network: {denyOut: [x]}}}}", field: "spec.barchan.sandbox.network.denyOut[0]"},
		{kind: "SandboxTemplate", name: "sandboxes' network policy", object: "spec: {barchan: {sandbox: {networkPolicy: {}}}}", field: "spec.barchan.sandbox.networkPolicy"},
		{kind: "SandboxTemplate", name: "volumes may change", object: "spec: {volumeClaimTemplates: [{metadata: {name: v}, spec: {}}]}", change: "spec: {volumeClaimTemplates: [{metadata: {name: w}, spec: {}}]}"},
		{kind: "SandboxTemplate", name: "image", object: "{}", change: "spec: {podTemplate: {spec: {containers: [{name: main, image: z}]}}}"},
	}...)
}

func poolVerdicts() []verdict {
	bounds := func(b string) string { return "spec: {barchan: {" + b + "}}" }
	return []verdict{
		{kind: "SandboxWarmPool", name: "as it is", object: "{}"},
		{kind: "SandboxWarmPool", name: "all set", object: "spec: {replicas: 7, updateStrategy: {type: Recreate}, barchan: {templateNamespace: other, maxSurge: 10%, maxUnavailable: 1, autoscale: {minReplicas: 1, maxReplicas: 10, sparePercent: 50, idleSeconds: 60}}}"},
		{kind: "SandboxWarmPool", name: "null is left out", object: "spec: {replicas: null, updateStrategy: null}"},
		{kind: "SandboxWarmPool", name: "empty strategy", object: "spec: {updateStrategy: {}}"},
		{kind: "SandboxWarmPool", name: "none", object: "spec: {replicas: 0}"},
		{kind: "SandboxWarmPool", name: "as many as may be", object: "spec: {replicas: 1000}"},
		{kind: "SandboxWarmPool", name: "less than none", object: "spec: {replicas: -1}", field: "spec.replicas"},
		{kind: "SandboxWarmPool", name: "too many", object: "spec: {replicas: 1001}", field: "spec.replicas"},
		{kind: "SandboxWarmPool", name: "too many later", object: "{}", change: "spec: {replicas: 1001}", field: "spec.replicas"},
		{kind: "SandboxWarmPool", name: "more than a number holds", object: "spec: {replicas: 3000000000}", field: "spec.replicas"},
		{kind: "SandboxWarmPool", name: "not a number", object: "spec: {replicas: many}", field: "spec.replicas"},
		{kind: "SandboxWarmPool", name: "half a sandbox", object: "spec: {replicas: 0.5}", field: "spec.replicas"},
		{kind: "SandboxWarmPool", name: "no template", object: "spec: {sandboxTemplateRef: null}", field: "spec.sandboxTemplateRef.name", real: "spec.sandboxTemplateRef"},
		{kind: "SandboxWarmPool", name: "template without a name", object: "spec: {sandboxTemplateRef: {name: null}}", field: "spec.sandboxTemplateRef.name"},
		{kind: "SandboxWarmPool", name: "template's empty name", object: "spec: {sandboxTemplateRef: {name: ''}}", field: "spec.sandboxTemplateRef.name"},
		{kind: "SandboxWarmPool", name: "another template", object: "{}", change: "spec: {sandboxTemplateRef: {name: u}}"},
		{kind: "SandboxWarmPool", name: "strategy", object: "spec: {updateStrategy: {type: Later}}", field: "spec.updateStrategy.type"},
		{kind: "SandboxWarmPool", name: "surge", object: bounds("maxSurge: -1"), field: "spec.barchan.maxSurge"},
		{kind: "SandboxWarmPool", name: "surge without a sign", object: bounds("maxSurge: '10'"), field: "spec.barchan.maxSurge"},
		{kind: "SandboxWarmPool", name: "surge beyond all", object: bounds("maxSurge: 101%"), field: "spec.barchan.maxSurge"},
		{kind: "SandboxWarmPool", name: "surge beyond a number", object: bounds("maxSurge: 3000000000"), field: "spec.barchan.maxSurge"},
		{kind: "SandboxWarmPool", name: "surge with a zero before", object: bounds("maxSurge: 010%"), field: "spec.barchan.maxSurge"},
		{kind: "SandboxWarmPool", name: "surge of all", object: bounds("maxSurge: 100%, maxUnavailable: 0")},
		{kind: "SandboxWarmPool", name: "unavailable", object: bounds("maxUnavailable: -5%"), field: "spec.barchan.maxUnavailable"},
		{kind: "SandboxWarmPool", name: "unavailable alone", object: bounds("maxUnavailable: 25%")},
		{kind: "SandboxWarmPool", name: "neither may move", object: bounds("maxUnavailable: 0"), field: "spec.barchan.maxUnavailable"},
		{kind: "SandboxWarmPool", name: "neither may move, both set", object: bounds("maxSurge: 0%, maxUnavailable: 0%"), field: "spec.barchan.maxUnavailable"},
		{kind: "SandboxWarmPool", name: "neither may move later", object: bounds("maxSurge: 1, maxUnavailable: 0"), change: bounds("maxSurge: 0"), field: "spec.barchan.maxUnavailable"},
	}
}

func autoscaleVerdicts() []verdict {
	scale := func(a string) string { return "spec: {barchan: {autoscale: {" + a + "}}}" }
	return []verdict{
		{kind: "SandboxWarmPool", name: "autoscale defaults", object: scale("maxReplicas: 5")},
		{kind: "SandboxWarmPool", name: "autoscale from nothing to one", object: scale("minReplicas: 0, maxReplicas: 1, sparePercent: 1, idleSeconds: 1")},
		{kind: "SandboxWarmPool", name: "autoscale fixed", object: scale("minReplicas: 1000, maxReplicas: 1000, sparePercent: 99")},
		{kind: "SandboxWarmPool", name: "autoscale without a bound", object: scale("minReplicas: 0"), field: "spec.barchan.autoscale.maxReplicas"},
		{kind: "SandboxWarmPool", name: "autoscale to none", object: scale("maxReplicas: 0"), field: "spec.barchan.autoscale.maxReplicas"},
		{kind: "SandboxWarmPool", name: "autoscale too far", object: scale("maxReplicas: 1001"), field: "spec.barchan.autoscale.maxReplicas"},
		{kind: "SandboxWarmPool", name: "autoscale from less than none", object: scale("minReplicas: -1, maxReplicas: 5"), field: "spec.barchan.autoscale.minReplicas"},
		{kind: "SandboxWarmPool", name: "autoscale upside down", object: scale("minReplicas: 6, maxReplicas: 5"), field: "spec.barchan.autoscale.minReplicas"},
		{kind: "SandboxWarmPool", name: "autoscale upside down later", object: scale("minReplicas: 4, maxReplicas: 5"), change: scale("maxReplicas: 3"), field: "spec.barchan.autoscale.minReplicas"},
		{kind: "SandboxWarmPool", name: "spare of less than none", object: scale("maxReplicas: 5, sparePercent: -1"), field: "spec.barchan.autoscale.sparePercent"},
		{kind: "SandboxWarmPool", name: "spare of all", object: scale("maxReplicas: 5, sparePercent: 100"), field: "spec.barchan.autoscale.sparePercent"},
		{kind: "SandboxWarmPool", name: "idle before it began", object: scale("maxReplicas: 5, idleSeconds: -1"), field: "spec.barchan.autoscale.idleSeconds"},
	}
}

func claimVerdicts() []verdict {
	return []verdict{
		{kind: "SandboxClaim", name: "as it is", object: "{}"},
		{kind: "SandboxClaim", name: "all set", object: "spec: {lifecycle: {shutdownTime: '2030-01-02T03:04:05Z', ttlSecondsAfterFinished: 0, shutdownPolicy: DeleteForeground}, additionalPodMetadata: {labels: {a: b}, annotations: {c: d}}, env: [{name: E, value: v, containerName: main}, {name: F}], volumeClaimTemplates: [{metadata: {name: v}, spec: {}}]}"},
		{kind: "SandboxClaim", name: "empty lifecycle", object: "spec: {lifecycle: {}}"},
		{kind: "SandboxClaim", name: "no pool", object: "spec: {warmPoolRef: null}", field: "spec.warmPoolRef.name", real: "spec.warmPoolRef"},
		{kind: "SandboxClaim", name: "pool without a name", object: "spec: {warmPoolRef: {name: null}}", field: "spec.warmPoolRef.name"},
		{kind: "SandboxClaim", name: "pool's empty name", object: "spec: {warmPoolRef: {name: ''}}", field: "spec.warmPoolRef.name"},
		{kind: "SandboxClaim", name: "shutdown policy", object: "spec: {lifecycle: {shutdownPolicy: Sometimes}}", field: "spec.lifecycle.shutdownPolicy"},
		{kind: "SandboxClaim", name: "shutdown policy later", object: "{}", change: "spec: {lifecycle: {shutdownPolicy: Sometimes}}", field: "spec.lifecycle.shutdownPolicy"},
		{kind: "SandboxClaim", name: "time to live", object: "spec: {lifecycle: {ttlSecondsAfterFinished: -1}}", field: "spec.lifecycle.ttlSecondsAfterFinished"},
		{kind: "SandboxClaim", name: "variable without a name", object: "spec: {env: [{name: A}, {value: v}]}", field: "spec.env[1].name"},
		{kind: "SandboxClaim", name: "variable's empty name", object: "spec: {env: [{name: ''}]}", field: "spec.env[0].name"},
		{kind: "SandboxClaim", name: "volume without a name", object: "spec: {volumeClaimTemplates: [{spec: {}}]}"},
		{kind: "SandboxClaim", name: "volume's empty name", object: "spec: {volumeClaimTemplates: [{metadata: {name: ''}, spec: {}}]}"},
		{kind: "SandboxClaim", name: "volume's name", object: "spec: {volumeClaimTemplates: [{metadata: {name: A_b}, spec: {}}]}"},
		{kind: "SandboxClaim", name: "volume's long name", object: "spec: {volumeClaimTemplates: [{metadata: {name: " + strings.Repeat("a", 64) + "}, spec: {}}]}"},
		{kind: "SandboxClaim", name: "volumes of one name", object: "spec: {volumeClaimTemplates: [{metadata: {name: a}, spec: {}}, {metadata: {name: a}, spec: {}}]}"},
		{kind: "SandboxClaim", name: "too many volumes", object: "spec: {volumeClaimTemplates: [" + repeat(33, "{metadata: {name: v%}, spec: {}}") + "]}", field: "spec.volumeClaimTemplates"},
	}
}

func checkpointVerdicts() []verdict {
	return []verdict{
		{kind: "Checkpoint", name: "as it is", object: "{}"},
		{kind: "Checkpoint", name: "all set", object: "spec: {keepRunning: true, content: Files, ttlSeconds: 0}"},
		{kind: "Checkpoint", name: "no sandbox", object: "spec: {sandboxName: null}", field: "spec.sandboxName"},
		{kind: "Checkpoint", name: "sandbox's empty name", object: "spec: {sandboxName: ''}", field: "spec.sandboxName"},
		{kind: "Checkpoint", name: "content", object: "spec: {content: Everything}", field: "spec.content"},
		{kind: "Checkpoint", name: "time to live", object: "spec: {ttlSeconds: -1}", field: "spec.ttlSeconds"},
		{kind: "Checkpoint", name: "import", object: "spec: {origin: Import}"},
		{kind: "Checkpoint", name: "origin", object: "spec: {origin: Elsewhere}", field: "spec.origin"},
		{kind: "Checkpoint", name: "another origin", object: "{}", change: "spec: {origin: Import}", field: "spec"},
		{kind: "Checkpoint", name: "keeps running after all", object: "{}", change: "spec: {keepRunning: true}", field: "spec"},
		{kind: "Checkpoint", name: "suspends after all", object: "spec: {keepRunning: true}", change: "spec: {keepRunning: null}", field: "spec"},
		{kind: "Checkpoint", name: "is suspended, as before", object: "spec: {keepRunning: false}", change: "spec: {ttlSeconds: 1}"},
		{kind: "Checkpoint", name: "no time to live any more", object: "spec: {ttlSeconds: 5}", change: "spec: {ttlSeconds: null}"},
		{kind: "Checkpoint", name: "bad time to live later", object: "{}", change: "spec: {ttlSeconds: -1}", field: "spec.ttlSeconds"},
		{kind: "Checkpoint", name: "another sandbox", object: "{}", change: "spec: {sandboxName: other}", field: "spec"},
		{kind: "Checkpoint", name: "another content", object: "{}", change: "spec: {content: Files}", field: "spec"},
		{kind: "Checkpoint", name: "another time to live", object: "{}", change: "spec: {ttlSeconds: 9}"},
	}
}

func keyVerdicts() []verdict {
	return []verdict{
		{kind: "APIKey", name: "as it is", object: "{}"},
		{kind: "APIKey", name: "all set", object: "spec: {description: mine, prefix: barchan_1234, expiresAt: '2030-01-02T03:04:05Z'}"},
		{kind: "APIKey", name: "no hash", object: "spec: {sha256: null}", field: "spec.sha256"},
		{kind: "APIKey", name: "short hash", object: "spec: {sha256: abc}", field: "spec.sha256"},
		{kind: "APIKey", name: "long hash", object: "spec: {sha256: " + strings.Repeat("a", 65) + "}", field: "spec.sha256"},
		{kind: "APIKey", name: "upper-case hash", object: "spec: {sha256: " + strings.Repeat("A", 64) + "}", field: "spec.sha256"},
		{kind: "APIKey", name: "too much of the key", object: "spec: {prefix: barchan_12345}", field: "spec.prefix"},
		{kind: "APIKey", name: "prefix of long letters", object: "spec: {prefix: éééééééééééé}"},
	}
}

func revisionVerdicts() []verdict {
	return []verdict{
		{kind: "TemplateRevision", name: "as it is", object: "{}"},
		{kind: "TemplateRevision", name: "no template", object: "spec: {templateName: null}", field: "spec.templateName"},
		{kind: "TemplateRevision", name: "template's empty name", object: "spec: {templateName: ''}", field: "spec.templateName"},
		{kind: "TemplateRevision", name: "no revision", object: "spec: {revision: null}", field: "spec.revision"},
		{kind: "TemplateRevision", name: "revision", object: "spec: {revision: z}", field: "spec.revision"},
		{kind: "TemplateRevision", name: "no number", object: "spec: {number: null}", field: "spec.number"},
		{kind: "TemplateRevision", name: "number", object: "spec: {number: 0}", field: "spec.number"},
		{kind: "TemplateRevision", name: "no content", object: "spec: {content: null}", field: "spec.content"},
		{kind: "TemplateRevision", name: "content that is no object", object: "spec: {content: 5}", field: "spec.content"},
		{kind: "TemplateRevision", name: "another number", object: "{}", change: "spec: {number: 2}", field: "spec"},
		{kind: "TemplateRevision", name: "another content", object: "{}", change: "spec: {content: {a: {b: [2, x]}}}", field: "spec"},
		{kind: "TemplateRevision", name: "label", object: "{}", change: "metadata: {labels: {a: b}}"},
	}
}

func buildVerdicts() []verdict {
	const from = "from: {image: x}"
	hash := strings.Repeat("0123456789abcdef", 4)
	return []verdict{
		{kind: "TemplateBuild", name: "as it is", object: "{}"},
		{kind: "TemplateBuild", name: "all set", object: "spec: {" + from + ", steps: [{type: Run, args: [ls, root], force: true}, {type: Copy, args: [a, b, '', '0644'], filesHash: " + hash + "}, " +
			"{type: Env, args: [A, b]}, {type: Workdir, args: [/a]}, {type: User, args: [root]}], startCommand: a, readyCommand: b, force: true, cpu: 500m, memory: 1Gi}"},
		{kind: "TemplateBuild", name: "no template", object: "spec: {templateName: null}", field: "spec.templateName"},
		{kind: "TemplateBuild", name: "template's name", object: "spec: {templateName: A_b}", field: "spec.templateName"},
		{kind: "TemplateBuild", name: "from nothing", object: "spec: {from: {}}", field: "spec.from"},
		{kind: "TemplateBuild", name: "from two", object: "spec: {from: {image: x, templateName: t}}", field: "spec.from"},
		{kind: "TemplateBuild", name: "from a template", object: "spec: {from: {image: '', templateName: t}}"},
		{kind: "TemplateBuild", name: "step's type", object: "spec: {steps: [{type: Mount, args: [a]}]}", field: "spec.steps[0].type"},
		{kind: "TemplateBuild", name: "step without arguments", object: "spec: {steps: [{type: Run, args: []}]}", field: "spec.steps[0].args"},
		{kind: "TemplateBuild", name: "step with too many", object: "spec: {steps: [{type: Run, args: [a, b, c]}]}", field: "spec.steps[0].args"},
		{kind: "TemplateBuild", name: "copy without destination", object: "spec: {steps: [{type: Copy, args: [a], filesHash: " + hash + "}]}", field: "spec.steps[0].args"},
		{kind: "TemplateBuild", name: "copy without files", object: "spec: {steps: [{type: Copy, args: [a, b]}]}", field: "spec.steps[0].filesHash"},
		{kind: "TemplateBuild", name: "files' hash", object: "spec: {steps: [{type: Copy, args: [a, b], filesHash: x}]}", field: "spec.steps[0].filesHash"},
		{kind: "TemplateBuild", name: "files of a command", object: "spec: {steps: [{type: Run, args: [a], filesHash: " + hash + "}]}", field: "spec.steps[0].filesHash"},
		{kind: "TemplateBuild", name: "variable without value", object: "spec: {steps: [{type: Env, args: [a, b, c]}]}", field: "spec.steps[0].args"},
		{kind: "TemplateBuild", name: "begins", object: "{}", change: "spec: {" + from + ", steps: [{type: Run, args: [ls]}]}"},
		{kind: "TemplateBuild", name: "another step later", object: "spec: {" + from + "}", change: "spec: {steps: [{type: Run, args: [ls]}]}", field: "spec"},
		{kind: "TemplateBuild", name: "another template", object: "{}", change: "spec: {templateName: other}", field: "spec.templateName"},
		{kind: "TemplateBuild", name: "label", object: "spec: {" + from + "}", change: "metadata: {labels: {a: b}}"},
	}
}
